#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROOM (64 * 1024) /* about what the kernel takes for a call */
#define TRIES 100

/* Its pages are there from now on; what was in it is not. */
void touch(void *memory, size_t size) {
    for (size_t at = 0; at < size; at += 4096) ((volatile char *)memory)[at] = 1;
    if (size) ((volatile char *)memory)[size - 1] = 1;
}

/* Where a sandbox stands still for want of memory (oom="hold"), who touches a page waits for it, while calls fail:
   ENOBUFS those that send, ENFILE those that make a socket, EFAULT those that read into a page that is new. */
static void await_memory(void) {
    static char room[ROOM] __attribute__((aligned(4096)));
    touch(room, ROOM);
    madvise(room, ROOM, MADV_DONTNEED);
    usleep(1000);
}

bool again(void) {
    if (errno == EINTR) return true;
    if (errno != ENOBUFS && errno != ENOMEM && errno != ENFILE && errno != EFAULT) return false;
    await_memory();
    return true;
}

void *resized(void *memory, size_t size) {
    for (int tries = 0; tries < TRIES; tries++) {
        void *found = realloc(memory, size ? size : 1);
        if (found) return found;
        await_memory();
    }
    leave(1); /* more than it may ever have */
}

void *take(size_t size) { return resized(NULL, size); }

char *take_string(const char *text, size_t size) {
    char *copy = take(size + 1);
    memcpy(copy, text, size);
    copy[size] = 0;
    return copy;
}

static void reserve(struct bytes *to, size_t more) {
    if (to->size + more <= to->room) return;
    size_t room = to->room * 2 > to->size + more ? to->room * 2 : to->size + more;
    to->data = resized(to->data, room);
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
    if (size < 0 || (size_t)size >= sizeof text) leave(1);
    add(to, text, (size_t)size);
}

void drop(struct bytes *bytes) {
    free(bytes->data);
    *bytes = (struct bytes){0};
}
