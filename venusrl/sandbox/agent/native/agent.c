#define _GNU_SOURCE
#include "agent.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORKSPACE "/workspace"
#define LONGEST_POLL 3600.0

struct state here = {.listener = -1, .oom = -1, .paused_at = -1};

/* What a polled descriptor is for. */
struct source {
    enum { LIFE, CONTROL, WATCHES, OLD_PIPE, JOB } what;
    int fd;
    int64_t job;
};

static void want(struct bytes *sources, struct bytes *polls, struct source source, short events) {
    struct pollfd poll = {source.fd, events, 0};
    add(sources, &source, sizeof source);
    add(polls, &poll, sizeof poll);
}

/* Output that the owner does not take stays in its pipe, where writing stops. */
static void want_job(struct bytes *sources, struct bytes *polls, const struct job *job) {
    bool writes = job->unsent && job->stdin_fd >= 0;
    for (int i = 0; i < 2; i++) {
        short events = is_held(job) ? 0 : POLLIN;
        if (job->terminal && writes) events |= POLLOUT;
        if (job->outputs[i] >= 0 && events)
            want(sources, polls, (struct source){JOB, job->outputs[i], job->number}, events);
    }
    if (writes && !job->terminal) want(sources, polls, (struct source){JOB, job->stdin_fd, job->number}, POLLOUT);
}

static void handle_job(const struct source *source) {
    struct job *job = find(source->job);
    if (!job) return; /* what came before has ended it */
    if (source->fd == job->stdin_fd && job->unsent) write_job(job, answer_error);
    for (int i = 0; i < 2; i++)
        if (job->outputs[i] == source->fd && !is_held(job)) move_output(job, i);
}

static void handle(const struct source *source) {
    switch (source->what) {
    case LIFE:
        leave(0); /* the spawner is gone */
    case CONTROL:
        if (source->fd == here.control) serve(receive(here.control));
        return;
    case WATCHES:
        if (source->fd == watch_fd()) read_watches(tell_events);
        return;
    case OLD_PIPE:
        drain_old(source->fd);
        return;
    case JOB:
        handle_job(source);
    }
}

static void meet_deadlines(void) {
    double time = now();
    for (struct job *job = here.jobs, *next; job; job = next) {
        next = job->next;
        if (job->ended) {
            finish(job);
        } else if (here.paused_at < 0 && due(job) >= 0 && time >= due(job)) {
            bool quiet = job->silent_s >= 0 && time >= job->last_output + job->silent_s;
            stop(job, quiet ? "silent" : "deadline");
            next = here.jobs; /* its end may have ended others */
        }
    }
    if (here.spare.pid && time >= here.spare_until) drop_spare();
}

static double patience(void) {
    if (here.paused_at >= 0) return -1;
    double until = here.spare.pid ? here.spare_until : INFINITY;
    for (struct job *job = here.jobs; job; job = job->next)
        if (due(job) >= 0) until = fmin(until, due(job));
    return isinf(until) ? -1 : fmin(fmax(until - now(), 0), LONGEST_POLL);
}

static void step(const sigset_t *while_waiting) {
    static struct bytes sources, polls; /* their room is kept from step to step */
    sources.size = polls.size = 0;
    want(&sources, &polls, (struct source){CONTROL, here.control, 0}, POLLIN);
    want(&sources, &polls, (struct source){LIFE, here.life, 0}, POLLIN);
    if (watch_fd() >= 0) want(&sources, &polls, (struct source){WATCHES, watch_fd(), 0}, POLLIN);
    for (int i = 0; i < here.old_pipe_count; i++) want(&sources, &polls, (struct source){OLD_PIPE, here.old_pipes[i], 0}, POLLIN);
    for (struct job *job = here.jobs; job; job = job->next) want_job(&sources, &polls, job);
    double seconds = patience();
    struct timespec time = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    size_t count = sources.size / sizeof(struct source);
    struct pollfd *ready = (struct pollfd *)polls.data;
    int found = ppoll(ready, count, seconds < 0 ? NULL : &time, while_waiting);
    reap();
    for (size_t i = 0; found > 0 && i < count; i++)
        if (ready[i].revents) handle((struct source *)sources.data + i);
    meet_deadlines();
}

static void awake(int number) { (void)number; }

/* The descriptor that an argument names, where commands do not get it. */
static int own(const char *argument) {
    int given = atoi(argument);
    int fd = given < 0 ? -1 : fcntl(given, F_DUPFD_CLOEXEC, 3);
    if (given > 2) close(given);
    return fd;
}

/* Where no namespace keeps signals from the first process (gVisor), it begins as root, who may be another user, and
   keeps that as its real user: then commands, which have no part of it, cannot signal it, while it can signal them. */
static void stand_apart(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    if (getuid() != 0) return;
    if (setresgid(0, USER, 0) || setresuid(0, USER, 0) || syscall(SYS_capset, &header, none)) _exit(1);
    here.apart = true;
}

/* Arguments: descriptors of the owner's socket, or of one that listens for owners, of the pipe that ends with the
   spawner, of the cgroup's kills (or -1), and three of the commands' freezer (or -1, see freezer.c); the most processes
   of a command; the most bytes kept of an output. Its variables are those of every command. */
int main(int count, char **arguments) {
    if (count == 3 && !strcmp(arguments[1], "loopback")) return raise_loopback(arguments[2]);
    if (count != 9) return 2;
    stand_apart();
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    here.control = own(arguments[1]);
    int listens = 0;
    socklen_t size = sizeof listens;
    if (!getsockopt(here.control, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens) {
        here.listener = here.control;
        here.control = accept_owner(here.listener);
    }
    here.life = own(arguments[2]);
    here.oom = own(arguments[3]);
    const int freezer[3] = {own(arguments[4]), own(arguments[5]), own(arguments[6])};
    take_freezer(freezer);
    here.shell.processes = atol(arguments[7]);
    here.shell.output_bytes = (size_t)atoll(arguments[8]);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC); /* the sandbox's own */
    for (int fd = 0; fd < 3; fd++)
        if (null < 0 || dup2(null, fd) < 0) return 1;
    close(null);
    if (chdir(WORKSPACE)) return 1;
    sigset_t child, none;
    sigemptyset(&none);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    struct sigaction wakes = {.sa_handler = awake}, ignored = {.sa_handler = SIG_IGN};
    sigaction(SIGCHLD, &wakes, NULL);
    sigaction(SIGPIPE, &ignored, NULL);
    sigaction(SIGXFSZ, &ignored, NULL);
    say("{\"ready\":true}");
    for (;;) step(&none);
}
