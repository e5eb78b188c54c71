"""Compiled programs are kept between tests: most engines and learners of the suite compile the same few."""

from launchers.system import use_compile_cache

use_compile_cache()
