/* How commands are made to stand still; see venusrl/sandbox/agent/freezer.py. */

#define _GNU_SOURCE
#include "agent.h"

#include <ctype.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define FREEZE_WAIT 5.0
#define AGAIN 200 /* looks, after which version 1 is told again: a fork may have kept it from finishing */

static int state = -1, seen = -1;
static bool is_first; /* version 1 */

static void tell(const char *word) {
    ssize_t told;
    do told = pwrite(state, word, strlen(word), 0);
    while (told < 0 && again());
}

static bool is_frozen(void) {
    static char text[4096];
    ssize_t size;
    do size = pread(seen, text, sizeof text - 1, 0);
    while (size < 0 && again());
    text[size > 0 ? size : 0] = 0;
    return is_first ? !strncmp(text, "FROZEN", 6) : strstr(text, "frozen 1") != NULL;
}

/* fds: that freeze, that tell whether all are frozen, and that shells join by; or three times -1. */
void take_freezer(const int fds[3]) {
    char first = 0;
    state = fds[0];
    seen = fds[1];
    is_first = state >= 0 && pread(state, &first, 1, 0) == 1 && isalpha((unsigned char)first);
    int join = fds[2] >= 0 ? fds[2] : open("/dev/null", O_WRONLY | O_CLOEXEC);
    here.shell.join = fcntl(join, F_DUPFD_CLOEXEC, 10); /* above all that a shell is given */
    close(join);
    if (here.shell.join < 0) _exit(1);
}

void drop_freezer(void) {
    if (state >= 0) {
        close(state);
        close(seen);
    }
    close(here.shell.join);
    state = seen = here.shell.join = -1;
}

/* Nothing in the sandbox can undo it. */
bool freezer_holds(void) { return state >= 0; }

/* Returns when all stand still; false where one does not come back from the kernel. */
bool freeze(void) {
    if (state < 0) {
        signal_all(SIGSTOP);
        return true;
    }
    tell(is_first ? "FROZEN" : "1");
    double give_up = now() + FREEZE_WAIT;
    for (int looks = 1; !is_frozen(); looks++) {
        if (now() > give_up) return false;
        usleep(500);
        if (is_first && looks % AGAIN == 0) tell("FROZEN");
    }
    return true;
}

void thaw(void) {
    if (state < 0) signal_all(SIGCONT);
    else tell(is_first ? "THAWED" : "0");
}

/* The end of the agent, and of the sandbox with it: what is frozen by version 1 could not die. */
void leave(int code) {
    if (state >= 0) {
        signal_all(SIGKILL);
        thaw();
    }
    _exit(code);
}
