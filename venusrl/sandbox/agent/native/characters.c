#include "agent.h"

/* Bytes of the character at `at`, 0 where it is not UTF-8. */
size_t utf8_size(const unsigned char *at, size_t left) {
    size_t size = at[0] < 0x80 ? 1 : at[0] >= 0xC2 && at[0] < 0xE0 ? 2 : at[0] >= 0xE0 && at[0] < 0xF0 ? 3
                  : at[0] >= 0xF0 && at[0] < 0xF5 ? 4 : 0;
    if (!size || size > left) return 0;
    for (size_t i = 1; i < size; i++)
        if ((at[i] & 0xC0) != 0x80) return 0;
    bool overlong = (at[0] == 0xE0 && at[1] < 0xA0) || (at[0] == 0xF0 && at[1] < 0x90);
    bool not_a_character = (at[0] == 0xED && at[1] >= 0xA0) || (at[0] == 0xF4 && at[1] >= 0x90);
    return overlong || not_a_character ? 0 : size;
}

/* Bytes of a character that begins so; 1 where none does. */
static size_t promised(unsigned char first) {
    return first >= 0xC2 && first < 0xE0 ? 2 : first >= 0xE0 && first < 0xF0 ? 3 : first >= 0xF0 && first < 0xF5 ? 4 : 1;
}

size_t whole_end(const char *data, size_t size) {
    for (size_t back = 1; back < 4 && back <= size; back++) {
        unsigned char byte = (unsigned char)data[size - back];
        if ((byte & 0xC0) != 0x80) return promised(byte) > back ? size - back : size;
    }
    return size;
}

size_t whole_start(const char *data, size_t size) {
    size_t at = 0;
    while (at < 3 && at < size && ((unsigned char)data[at] & 0xC0) == 0x80) at++;
    return at;
}
