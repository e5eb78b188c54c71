#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define READ (64 * 1024)
#define MOST_ENDED 32 /* started commands whose ends are remembered */
#define KILL_WAIT 10.0
#define SPARE_WAIT 5.0 /* seconds that a shell waits for the next command */

static struct end ended[MOST_ENDED];
static size_t ended_count; /* ever */

int64_t oom_kills(void) {
    static char text[16384]; /* a cgroup's counters, or a guest's whole /proc/vmstat */
    ssize_t size = here.oom < 0 ? -1 : pread(here.oom, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    for (char *at = text; at && *at; at = (at = strchr(at, '\n')) ? at + 1 : NULL)
        if (!strncmp(at, "oom_kill ", 9)) return atoll(at + 9);
    return 0;
}

struct job *find(int64_t number) {
    for (struct job *job = here.jobs; job; job = job->next)
        if (job->number == number) return job;
    return NULL;
}

struct job *running(const struct value *header) {
    bool missing = false;
    int64_t number = get_integer(header, "job", &missing);
    struct job *job = missing ? NULL : find(number);
    return job && !job->ended ? job : NULL;
}

/* Everything of the sandbox but this process. The kernel holds off forks meanwhile, so none escapes. */
void signal_all(int number) { kill(-1, number); }

void drop_spare(void) {
    if (here.spare.pid) close_spare(&here.spare);
    here.spare.pid = 0;
}

/* Collects every child that has ended, orphans too; whether one is left. */
bool reap(void) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid < 0) return false;
        if (pid == 0) return true;
        for (struct job *job = here.jobs; job; job = job->next)
            if (job->pid == pid) {
                job->ended = true;
                job->status = status;
            }
        if (here.spare.pid == pid) drop_spare();
    }
}

struct end *find_end(int64_t number) {
    for (size_t i = 0; i < MOST_ENDED; i++)
        if (ended[i].head.size && ended[i].number == number) return &ended[i];
    return NULL;
}

static void close_old(int at) {
    close(here.old_pipes[at]);
    memmove(here.old_pipes + at, here.old_pipes + at + 1, (size_t)(--here.old_pipe_count - at) * sizeof *here.old_pipes);
}

void drain_old(int fd) {
    static char buffer[READ];
    for (int i = 0; i < here.old_pipe_count; i++)
        if (here.old_pipes[i] == fd) {
            ssize_t got;
            do got = read(fd, buffer, sizeof buffer);
            while (got < 0 && again());
            if (got == 0 || (got < 0 && errno != EAGAIN)) close_old(i);
            return;
        }
}

void set_window(struct job *job, bool follows, int64_t window) {
    bool was = is_held(job);
    job->follows = follows;
    job->window = window;
    if (was != is_held(job)) job->last_output = now();
}

/* Bytes that were read now; those of an open window go to the owner. */
size_t move_output(struct job *job, int at) {
    static char buffer[READ];
    ssize_t got = read_job(job, at, buffer, sizeof buffer);
    if (got <= 0) return 0;
    if (job->follows) {
        struct bytes head = {0};
        addf(&head, "{\"job\":%lld,\"stream\":\"%s\"}", (long long)job->number, job->names[at]);
        send_frame(here.control, &head, buffer, (size_t)got);
        drop(&head);
        set_window(job, true, job->window - got);
    }
    return (size_t)got;
}

static void describe_end(struct job *job, struct bytes *head) {
    double until = here.paused_at < 0 ? now() : here.paused_at;
    int code = WIFEXITED(job->status) ? WEXITSTATUS(job->status) : -WTERMSIG(job->status);
    addf(head, "{\"%s\":%lld,\"exit_code\":%d,\"total\":%llu,\"timed_out\":", job->attached ? "id" : "job",
         (long long)job->number, code, (unsigned long long)job->capture.total);
    if (job->stopped) addf(head, "\"%s\"", job->stopped);
    else add(head, "null", 4);
    addf(head, ",\"seconds\":%.9f,\"oom\":%s}", until - job->started, oom_kills() > job->oom_kills ? "true" : "false");
}

/* A shell for what comes next, that ends unless it is used soon. Only where no process is that could tamper with it, and
   it ends before another starts: its script comes through a pipe that others of the sandbox could open. */
static void prepare(void) {
    here.spare_until = now() + SPARE_WAIT;
    if (here.spare.pid || here.paused_at >= 0 || here.jobs) return;
    pid_t *found;
    size_t others = processes_outside(NULL, 0, &found);
    free(found);
    if (!others) start_spare(&here.spare, &here.shell);
}

static void free_job(struct job *job) {
    for (struct job **at = &here.jobs; *at; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
    drop(&job->capture.head);
    drop(&job->capture.tail);
    free(job->script);
    free(job);
}

/* Takes what the pipes hold now, and answers; background writers keep the pipes. */
void finish(struct job *job) {
    for (int i = 0; i < 2; i++) {
        size_t left = 1 << 20; /* a pipe's largest size: more than this was written after the shell ended */
        for (size_t got = 1; job->outputs[i] >= 0 && left && got; left -= got < left ? got : left)
            got = move_output(job, i);
    }
    for (int i = 0; i < 2; i++)
        if (job->outputs[i] >= 0 && !job->terminal) {
            if (here.old_pipe_count == MOST_OLD_PIPES) close_old(0);
            here.old_pipes[here.old_pipe_count++] = job->outputs[i];
            job->outputs[i] = -1;
        }
    close_job(job);
    write_job(job, answer_error);
    struct end end = {.number = job->number, .output = kept(&job->capture)};
    describe_end(job, &end.head);
    send_frame(here.control, &end.head, end.output.data, end.output.size);
    bool attached = job->attached;
    free_job(job);
    if (attached) {
        drop(&end.head);
        drop(&end.output);
        prepare();
        return;
    }
    struct end *place = &ended[ended_count++ % MOST_ENDED];
    drop(&place->head);
    drop(&place->output);
    *place = end;
}

static bool any_exists(const pid_t *pids, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (exists(pids[i])) return true;
    return false;
}

/* What belongs to none of the commands whose shells are `others`; the caller frees the list. */
static size_t kill_outside(const struct bytes *others, pid_t **killed) {
    size_t count = processes_outside((pid_t *)others->data, others->size / sizeof(pid_t), killed);
    for (size_t i = 0; i < count; i++) kill((*killed)[i], SIGKILL);
    return count;
}

/* Ends every process of the sandbox that does not belong to another running command. */
void stop(struct job *job, const char *why) {
    struct bytes others = {0};
    pid_t *killed = NULL;
    size_t count = 0;
    for (struct job *other = here.jobs; other; other = other->next)
        if (other != job && !other->ended) add(&others, &other->pid, sizeof other->pid);
    job->stopped = why;
    if (!others.size) {
        signal_all(SIGKILL);
    } else {
        freeze(); /* so that none forks while the others are told apart */
        count = kill_outside(&others, &killed);
        thaw();
    }
    double give_up = now() + KILL_WAIT;
    for (int waits = 1; reap() && (!others.size || any_exists(killed, count)); waits++) {
        if (now() > give_up) leave(1); /* something cannot be killed: the sandbox is no longer of use */
        usleep(1000);
        if (!others.size && waits % 20 == 0) signal_all(SIGKILL); /* gVisor misses what is just being forked */
        if (others.size && !freezer_holds()) { /* what went on in spite of the signal may have forked */
            free(killed);
            count = kill_outside(&others, &killed);
        }
    }
    free(killed);
    drop(&others);
    finish(job);
}

int begin(const struct value *header, struct frame *frame) {
    struct job *job = take(sizeof *job);
    *job = (struct job){.oom_kills = oom_kills()};
    reap();
    int error = -EAGAIN;
    if (here.spare.pid && spare_fits(header, frame->body_size)) {
        error = start_job(job, &here.shell, header, frame->body, frame->body_size, &here.spare);
        if (error) drop_spare();
        here.spare.pid = 0;
    }
    if (error) {
        drop_spare();
        *job = (struct job){.oom_kills = job->oom_kills};
        error = start_job(job, &here.shell, header, frame->body, frame->body_size, NULL);
    }
    if (error) {
        free(job);
        return error;
    }
    struct job **last = &here.jobs;
    while (*last) last = &(*last)->next;
    *last = job;
    return 0;
}
