#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_HEAD (16u << 20)
#define MOST_BODY (1u << 30)

static void receive_exactly(int socket, void *to, size_t size) {
    while (size) {
        ssize_t got = recv(socket, to, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(0);
        to = (char *)to + got;
        size -= (size_t)got;
    }
}

struct frame receive(int socket) {
    uint32_t sizes[2];
    receive_exactly(socket, sizes, sizeof sizes);
    struct frame frame = {.head_size = ntohl(sizes[0]), .body_size = ntohl(sizes[1])};
    if (frame.head_size > MOST_HEAD || frame.body_size > MOST_BODY) _exit(0);
    frame.head = take(frame.head_size);
    frame.body = take(frame.body_size);
    receive_exactly(socket, frame.head, frame.head_size);
    receive_exactly(socket, frame.body, frame.body_size);
    return frame;
}

void send_frame(int socket, const struct bytes *head, const char *body, size_t body_size) {
    uint32_t sizes[2] = {htonl((uint32_t)head->size), htonl((uint32_t)body_size)};
    struct iovec parts[3] = {{sizes, sizeof sizes}, {head->data, head->size}, {(char *)body, body_size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    while (message.msg_iovlen) {
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) _exit(0);
        while (message.msg_iovlen && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
}
