"""A template as JSON, and back."""

import base64

from venusrl.core.errors import ConfigError
from venusrl.sandbox.contract import Template


def to_json(template: Template) -> dict:
    """The fields of a template as JSON has them; bytes are base64."""
    fields = {name: getattr(template, name) for name in template.__dataclass_fields__}
    files = {path: base64.b64encode(data).decode() for path, data in template.files.items()}
    return fields | {"files": files, "env": dict(template.env)}


def from_json(fields: dict) -> Template:
    """Raises ConfigError for what is no template."""
    try:
        files = {path: base64.b64decode(data, validate=True) for path, data in fields.get("files", {}).items()}
        lists = {name: tuple(fields[name]) for name in ("lowers", "setup") if name in fields}
        return Template(**{**fields, "files": files, **lists})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"template: {error}; give the fields of venusrl.sandbox.Template") from None
