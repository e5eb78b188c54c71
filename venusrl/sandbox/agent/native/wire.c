#include "agent.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_BODY (1u << 30)

static void receive_exactly(int fd, void *to, size_t size) {
    while (size) {
        ssize_t got = read(fd, to, size);
        if (got < 0 && again()) continue;
        if (got <= 0) leave(0);
        to = (char *)to + got;
        size -= (size_t)got;
    }
}

struct frame receive(int fd) {
    uint32_t sizes[2];
    receive_exactly(fd, sizes, sizeof sizes);
    struct frame frame = {.head_size = ntohl(sizes[0]), .body_size = ntohl(sizes[1])};
    if (frame.head_size > MOST_HEAD || frame.body_size > MOST_BODY) leave(0);
    frame.head = take(frame.head_size);
    frame.body = take(frame.body_size);
    receive_exactly(fd, frame.head, frame.head_size);
    receive_exactly(fd, frame.body, frame.body_size);
    return frame;
}

void send_frame(int fd, const struct bytes *head, const char *body, size_t body_size) {
    uint32_t sizes[2] = {htonl((uint32_t)head->size), htonl((uint32_t)body_size)};
    struct iovec parts[3] = {{sizes, sizeof sizes}, {head->data, head->size}, {(char *)body, body_size}};
    struct iovec *part = parts;
    int left = 3;
    while (left) {
        ssize_t sent = writev(fd, part, left);
        if (sent < 0 && again()) continue;
        if (sent < 0) leave(0);
        while (left && (size_t)sent >= part->iov_len) {
            sent -= (ssize_t)part->iov_len;
            part++;
            left--;
        }
        if (left) {
            part->iov_base = (char *)part->iov_base + sent;
            part->iov_len -= (size_t)sent;
        }
    }
}
