/* For who restores a sandbox: the loopback of its network, which in a new one is down, and has no address. */

#define _GNU_SOURCE
#include "agent.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

int raise_loopback(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    int network = open(path, O_RDONLY | O_CLOEXEC);
    if (network < 0 || setns(network, CLONE_NEWNET)) return 1;
    struct ifreq lo = {.ifr_flags = IFF_UP};
    strcpy(lo.ifr_name, "lo");
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return control < 0 || ioctl(control, SIOCSIFFLAGS, &lo);
}
