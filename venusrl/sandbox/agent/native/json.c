#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DEEPEST 8

struct reader {
    const char *at, *end;
    bool half;
};

static bool read_value(struct reader *in, struct value *out, int depth);

static void skip(struct reader *in) {
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\t' || *in->at == '\r' || *in->at == '\n')) in->at++;
}

static bool next_is(struct reader *in, char wanted) {
    skip(in);
    if (in->at == in->end || *in->at != wanted) return false;
    in->at++;
    return true;
}

static bool read_hex(struct reader *in, unsigned *code) {
    if (in->end - in->at < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; i++) {
        char c = *in->at++;
        unsigned digit;
        if (c >= '0' && c <= '9') digit = (unsigned)(c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f') digit = (unsigned)((c | 32) - 'a') + 10;
        else return false;
        *code = *code * 16 + digit;
    }
    return true;
}

static char *put_utf8(char *to, unsigned code) {
    if (code < 0x80) *to++ = (char)code;
    else if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
        *to++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        *to++ = (char)(0xE0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    } else {
        *to++ = (char)(0xF0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 63));
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    }
    return to;
}

/* What follows \u. A lone low surrogate of DC80 to DCFF is a byte. */
static char *read_unicode(struct reader *in, char *to) {
    unsigned code, low;
    if (!read_hex(in, &code)) return NULL;
    if (code >= 0xDC80 && code <= 0xDCFF) {
        *to++ = (char)(code & 0xFF);
        return to;
    }
    struct reader ahead = *in;
    if (code >= 0xD800 && code < 0xDC00 && ahead.end - ahead.at >= 6 && ahead.at[0] == '\\' && ahead.at[1] == 'u') {
        ahead.at += 2;
        if (read_hex(&ahead, &low) && low >= 0xDC00 && low < 0xE000) {
            *in = ahead;
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
    }
    if (code >= 0xD800 && code < 0xE000) in->half = true;
    return put_utf8(to, code);
}

static bool read_text(struct reader *in, char **text, size_t *size) {
    static const char names[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    if (!next_is(in, '"')) return false;
    const char *close = in->at;
    while (close < in->end && *close != '"') close += *close == '\\' ? 2 : 1;
    if (close >= in->end) return false;
    char *to = *text = take((size_t)(close - in->at) + 1);
    while (to && in->at < close) {
        if ((unsigned char)*in->at < 0x20) break; /* it has to be escaped */
        if (*in->at != '\\') {
            *to++ = *in->at++;
            continue;
        }
        char escape = in->at[1];
        in->at += 2;
        const char *known = escape ? strchr(names, escape) : NULL;
        if (known) *to++ = bytes[known - names];
        else to = escape == 'u' ? read_unicode(in, to) : NULL;
    }
    if (!to || in->at < close) {
        free(*text);
        *text = NULL;
        return false;
    }
    *to = 0;
    *size = (size_t)(to - *text);
    in->at = close + 1;
    return true;
}

static bool read_items(struct reader *in, struct value *out, int depth) {
    bool is_map = out->kind == MAP;
    char close = is_map ? '}' : ']';
    if (next_is(in, close)) return true;
    for (size_t room = 0;; ) {
        if (out->size == room) {
            room = room ? room * 2 : 8;
            out->items = resized(out->items, room * sizeof *out->items);
        }
        struct value *item = &out->items[out->size++];
        *item = (struct value){0};
        if (is_map && !(read_text(in, &item->key, &item->key_size) && next_is(in, ':'))) return false;
        if (!read_value(in, item, depth + 1)) return false;
        if (next_is(in, close)) return true;
        if (!next_is(in, ',')) return false;
    }
}

static bool read_word(struct reader *in, const char *word) {
    size_t size = strlen(word);
    if ((size_t)(in->end - in->at) < size || memcmp(in->at, word, size)) return false;
    in->at += size;
    return true;
}

static size_t count_digits(const struct reader *in) {
    const char *at = in->at;
    while (at < in->end && *at >= '0' && *at <= '9') at++;
    return (size_t)(at - in->at);
}

/* As RFC 8259 has them: no leading zero, no sign but a minus, digits on both sides of the point. */
static bool read_number(struct reader *in, struct value *out) {
    const char *begin = in->at;
    bool is_whole = true;
    if (*in->at == '-') in->at++;
    size_t digits = count_digits(in);
    if (!digits || (digits > 1 && *in->at == '0')) return false;
    in->at += digits;
    if (in->at < in->end && *in->at == '.') {
        in->at++;
        if (!(digits = count_digits(in))) return false;
        in->at += digits;
        is_whole = false;
    }
    if (in->at < in->end && (*in->at | 32) == 'e') {
        in->at++;
        if (in->at < in->end && (*in->at == '+' || *in->at == '-')) in->at++;
        if (!(digits = count_digits(in))) return false;
        in->at += digits;
        is_whole = false;
    }
    char *text = take_string(begin, (size_t)(in->at - begin));
    errno = 0;
    out->kind = NUMBER;
    out->integer = strtoll(text, NULL, 10);
    out->is_whole = is_whole && !errno;
    out->number = strtod(text, NULL);
    free(text);
    return true;
}

static bool read_value(struct reader *in, struct value *out, int depth) {
    skip(in);
    if (in->at == in->end || depth > DEEPEST) return false;
    switch (*in->at) {
    case '{':
    case '[':
        out->kind = *in->at++ == '{' ? MAP : LIST;
        return read_items(in, out, depth);
    case '"':
        out->kind = TEXT;
        return read_text(in, &out->text, &out->size);
    case 'n':
        return read_word(in, "null");
    case 't':
        out->kind = BOOL;
        out->is_whole = true;
        out->integer = 1;
        return read_word(in, "true");
    case 'f':
        out->kind = BOOL;
        out->is_whole = true;
        return read_word(in, "false");
    }
    return read_number(in, out);
}

struct value *parse(const char *text, size_t size) {
    struct reader in = {text, text + size, false};
    struct value *value = take(sizeof *value);
    *value = (struct value){0};
    bool read = read_value(&in, value, 0);
    skip(&in);
    read = read && in.at == in.end;
    value->half = in.half;
    if (read && value->kind == MAP) return value;
    forget(value);
    return NULL;
}

static void empty(struct value *value) {
    free(value->key);
    free(value->text);
    for (size_t i = 0; value->items && i < value->size; i++) empty(&value->items[i]);
    free(value->items);
}

void forget(struct value *value) {
    if (!value) return;
    empty(value);
    free(value);
}

const struct value *get(const struct value *map, const char *key) {
    size_t size = strlen(key);
    for (size_t i = map->size; i--; ) /* of several the last is meant */
        if (map->items[i].key_size == size && !memcmp(map->items[i].key, key, size)) return &map->items[i];
    return NULL;
}

int64_t get_integer(const struct value *map, const char *key, bool *missing) {
    const struct value *value = get(map, key);
    if (!value || !value->is_whole) {
        *missing = true;
        return 0;
    }
    return value->integer;
}

double get_seconds(const struct value *map, const char *key) {
    const struct value *value = get(map, key);
    return value && value->kind == NUMBER ? value->number : -1;
}

const char *get_text(const struct value *map, const char *key) {
    const struct value *value = get(map, key);
    return value && value->kind == TEXT ? value->text : NULL;
}

bool is(const struct value *map, const char *key, const char *text) {
    const char *found = get_text(map, key);
    return found && !strcmp(found, text);
}

static void add_quoted(struct bytes *to, const char *data, size_t size, bool as_it_is) {
    add(to, "\"", 1);
    for (size_t i = 0; i < size; ) {
        unsigned char c = (unsigned char)data[i];
        size_t length = utf8_size((const unsigned char *)data + i, size - i);
        if (!length && !as_it_is) addf(to, "\\ufffd");
        else if (!length) addf(to, "\\udc%02x", c);
        else if (c < 0x20 || c == 0x7F) addf(to, "\\u%04x", c);
        else if (c == '"' || c == '\\') addf(to, "\\%c", c);
        else add(to, data + i, length);
        i += length ? length : 1;
    }
    add(to, "\"", 1);
}

void add_text(struct bytes *to, const char *data, size_t size) { add_quoted(to, data, size, true); }

void add_shown(struct bytes *to, const char *data, size_t size) { add_quoted(to, data, size, false); }
