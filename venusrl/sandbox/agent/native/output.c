#include "agent.h"

#include <string.h>

#define SLACK 65536

void keep(struct capture *capture, const char *data, size_t size) {
    size_t head_limit = capture->limit / 2, tail_limit = capture->limit - capture->limit / 2;
    capture->total += size;
    size_t room = head_limit - capture->head.size, first = size < room ? size : room;
    add(&capture->head, data, first);
    data += first;
    size -= first;
    add(&capture->tail, data, size);
    if (capture->tail.size > 2 * tail_limit + SLACK) {
        memmove(capture->tail.data, capture->tail.data + capture->tail.size - tail_limit, tail_limit);
        capture->tail.size = tail_limit;
    }
}

struct bytes kept(const struct capture *capture) {
    size_t tail_limit = capture->limit - capture->limit / 2;
    size_t tail = capture->tail.size < tail_limit ? capture->tail.size : tail_limit;
    size_t head = capture->head.size;
    const char *end = tail ? capture->tail.data + capture->tail.size - tail : NULL;
    if (capture->total > head + tail) { /* no character is cut in two */
        head = whole_end(capture->head.data, head);
        size_t skipped = whole_start(end, tail);
        end += skipped;
        tail -= skipped;
    }
    uint64_t elided = capture->total - head - tail;
    struct bytes all = {0};
    add(&all, capture->head.data, head);
    if (elided) addf(&all, "\n[... %llu bytes elided ...]\n", (unsigned long long)elided);
    if (tail) add(&all, end, tail);
    return all;
}
