#include "agent.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *take(size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory) _exit(1);
    return memory;
}

char *take_string(const char *text, size_t size) {
    char *copy = take(size + 1);
    memcpy(copy, text, size);
    copy[size] = 0;
    return copy;
}

static void reserve(struct bytes *to, size_t more) {
    if (to->size + more <= to->room) return;
    size_t room = to->room * 2 > to->size + more ? to->room * 2 : to->size + more;
    to->data = realloc(to->data, room);
    if (!to->data) _exit(1);
    to->room = room;
}

void add(struct bytes *to, const void *data, size_t size) {
    if (!size) return;
    reserve(to, size);
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

void addf(struct bytes *to, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0 || (size_t)size >= sizeof text) _exit(1);
    add(to, text, (size_t)size);
}

void drop(struct bytes *bytes) {
    free(bytes->data);
    *bytes = (struct bytes){0};
}
