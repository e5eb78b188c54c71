#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Listens under a name that the kernel picks; its bytes in hexadecimal. */
int open_berth(char *name_hex, size_t room) {
    int listener, failed;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t size = sizeof(sa_family_t);
    do listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (listener < 0 && again());
    if (listener < 0) return -errno;
    do failed = bind(listener, (struct sockaddr *)&address, size);
    while (failed && again());
    bool bound = !failed && !listen(listener, 1);
    size = sizeof address;
    if (!bound || getsockname(listener, (struct sockaddr *)&address, &size)) {
        int error = -errno;
        close(listener);
        return error;
    }
    for (size_t i = 0; i < size - offsetof(struct sockaddr_un, sun_path) && 2 * i + 2 < room; i++)
        snprintf(name_hex + 2 * i, 3, "%02x", (unsigned char)address.sun_path[i]);
    return listener;
}

static int receive_fds(int socket, char *greeting, int fds[MOST_FDS], int *count) {
    char control[CMSG_SPACE(MOST_FDS * sizeof(int))];
    struct iovec part = {greeting, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    ssize_t got;
    do got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && again());
    if (got != 1) return -EPROTO;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (!rights || rights->cmsg_type != SCM_RIGHTS) return -EPROTO;
    *count = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(rights), (size_t)*count * sizeof(int));
    return 0;
}

int accept_owner(int listener) {
    int connection;
    do connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    while (connection < 0 && again());
    if (connection < 0) leave(1);
    return connection;
}

int wait_at_berth(int listener, char *greeting, int fds[MOST_FDS], int *count) {
    for (;;) {
        int connection = accept_owner(listener);
        struct ucred peer = {.pid = -1};
        socklen_t size = sizeof peer;
        bool is_outside = !getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.pid == 0;
        if (is_outside && !receive_fds(connection, greeting, fds, count)) {
            close(listener);
            return connection;
        }
        close(connection);
    }
}
