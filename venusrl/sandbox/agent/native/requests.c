#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* A command, or the end of one, that waits for the sandbox to go on. */
struct held {
    struct frame frame;
    bool is_end;
    struct held *next;
};

static struct held *held;

static void hold(struct frame frame, bool is_end) {
    struct held **last = &held;
    while (*last) last = &(*last)->next;
    *last = take(sizeof **last);
    **last = (struct held){frame, is_end, NULL};
}

static void free_frame(struct frame *frame) {
    free(frame->head);
    free(frame->body);
}

/* One that is frozen may not be able to end: it does before the others go on. */
static void cancel(int64_t number, struct frame *frame) {
    for (struct held **at = &held; *at; ) {
        struct held *one = *at;
        struct value *header = parse(one->frame.head, one->frame.head_size);
        bool missing = false, wanted = header && !(*at)->is_end && get_integer(header, "id", &missing) == number;
        forget(header);
        if (!wanted) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        free_frame(&one->frame);
        free(one);
    }
    struct job *job = find(number);
    if (!job || job->ended) return;
    if (here.paused_at < 0) {
        stop(job, "cancelled");
        return;
    }
    hold(*frame, true);
    *frame = (struct frame){0};
}

/* Whether all commands stand still for sure. */
static bool pause_all(bool keep_spare) {
    if (here.paused_at >= 0) return freeze();
    if (!keep_spare) drop_spare();
    bool is_frozen = freeze();
    here.paused_at = now();
    say("{\"paused\":true}");
    return is_frozen;
}

static struct held *serve_held(struct held *waiting, bool ends) {
    struct held *left = NULL, **last = &left;
    while (waiting) {
        struct held *one = waiting;
        waiting = one->next;
        if (one->is_end == ends) {
            serve(one->frame);
            free(one);
        } else {
            one->next = NULL;
            *last = one;
            last = &one->next;
        }
    }
    return left;
}

static void resume_all(void) {
    if (here.paused_at < 0) return;
    for (struct job *job = here.jobs; job; job = job->next) {
        job->started += now() - here.paused_at;
        job->last_output += now() - here.paused_at;
    }
    here.paused_at = -1;
    struct held *waiting = held;
    held = NULL;
    waiting = serve_held(waiting, true);
    thaw();
    say("{\"paused\":false}");
    serve_held(waiting, false);
}

/* Waits where it is, with all that it has, for the word of its owner, old or new; whether it is a new one. */
static bool stay(int64_t request) {
    answer(request, "", NULL, 0);
    close_watches();
    if (here.listener >= 0) {
        close(here.control);
        here.control = accept_owner(here.listener);
    }
    struct frame frame = receive(here.control);
    struct value *header = parse(frame.head, frame.head_size);
    bool missing = false, is_new = header && get_integer(header, "new", &missing);
    if (!header || !is(header, "op", "unpark")) leave(0);
    forget(header);
    free_frame(&frame);
    return is_new;
}

/* Lets go of everything outside of the sandbox, and waits for an owner; the answer says where. */
static int berth(int64_t request, bool *is_new) {
    char name[256], text[300];
    int listener = open_berth(name, sizeof name);
    if (listener < 0) return listener;
    snprintf(text, sizeof text, ",\"berth\":\"%s\"", name);
    answer(request, text, NULL, 0);
    int64_t kills = oom_kills();
    close(here.control);
    close(here.life);
    if (here.oom >= 0) close(here.oom);
    drop_freezer();
    close_watches();
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* what saves it is of another user */
    int fds[MOST_FDS] = {-1, -1, -1, -1, -1}, count;
    char greeting;
    here.control = wait_at_berth(listener, &greeting, fds, &count);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    here.life = fds[0];
    take_freezer(fds + 1);
    here.oom = fds[4];
    *is_new = greeting == '2';
    kills -= oom_kills(); /* where it has moved, another cgroup has counted others */
    for (struct job *job = here.jobs; job; job = job->next) job->oom_kills -= kills;
    return 0;
}

/* Stands still, for who saves it. */
static int park(int64_t request, bool stays) {
    bool is_new = false;
    bool is_frozen = pause_all(stays); /* a clone's first command finds the shell that is ready */
    if (stays) {
        is_new = stay(request);
    } else if (!freezer_holds() || !is_frozen) { /* a command could look into this process meanwhile */
        return freezer_holds() ? -EBUSY : -ENOTSUP;
    } else {
        int error = berth(request, &is_new);
        if (error) return error;
    }
    for (struct job *job = here.jobs; job && is_new; job = job->next) {
        job->attached = false; /* the new owner knows nothing of it, and can connect to it */
        set_window(job, false, 0);
    }
    if (stays && is_new) resume_all();
    say("{\"ready\":true}");
    open_watches(tell_events);
    return 0;
}

static void add_processes(struct bytes *to) {
    add(to, "\"processes\":[", 13);
    bool first = true;
    for (struct job *job = here.jobs; job; job = job->next) {
        if (job->ended) continue;
        addf(to, "%s[%lld,%d,", first ? "" : ",", (long long)job->number, job->pid);
        struct bytes script = {0};
        add_shown(&script, job->script, job->script_size);
        add(to, script.data, script.size);
        drop(&script);
        addf(to, ",%.9f]", now() - job->started);
        first = false;
    }
    add(to, "]", 1);
}

/* What is kept of the output so far; the rest follows. After its end, that again. */
static int connect_to(int64_t request, const struct value *header) {
    bool missing = false;
    int64_t number = get_integer(header, "job", &missing), window = get_integer(header, "window", &missing);
    struct job *over = missing ? NULL : find(number);
    if (over && over->ended) finish(over);
    struct end *end = missing ? NULL : find_end(number);
    if (end) {
        answer(request, ",\"pid\":0", end->output.data, end->output.size);
        send_frame(here.control, &end->head, end->output.data, end->output.size);
        return 0;
    }
    struct job *job = running(header);
    if (missing || !job || job->attached) return missing ? -EINVAL : -ESRCH;
    char text[32];
    struct bytes output = kept(&job->capture);
    snprintf(text, sizeof text, ",\"pid\":%d", job->pid);
    answer(request, text, output.data, output.size);
    drop(&output);
    set_window(job, true, window);
    return 0;
}

static void change_window(const struct value *header) {
    bool missing = false;
    const struct value *more = get(header, "bytes");
    struct job *job = find(get_integer(header, "job", &missing));
    if (!job || missing || !more) return;
    if (more->kind != NUMBER || !job->follows) set_window(job, false, 0);
    else set_window(job, true, job->window + more->integer);
}

static int take_input(int64_t request, const struct value *header, struct frame *frame) {
    struct job *job = running(header);
    if (!job) return -ESRCH;
    if (job->stdin_fd < 0) return -EPIPE;
    struct input *input = take(sizeof *input), **last = &job->unsent;
    *input = (struct input){.request = request, .size = frame->body_size};
    if (frame->body_size) {
        input->data = frame->body;
        frame->body = NULL;
    }
    while (*last) last = &(*last)->next;
    *last = input;
    write_job(job, answer_error);
    return 0;
}

/* 1: the request is answered later, or not at all; 0: with `fields`; negative: with that error. */
static int dispatch(const char *op, int64_t id, const struct value *header, struct frame *frame, struct bytes *fields,
                    struct bytes *body) {
    bool missing = false;
    int error;
    if (!strcmp(op, "exec") || !strcmp(op, "start")) {
        error = begin(header, frame);
        if (error || !strcmp(op, "exec")) return error ? error : 1;
        addf(fields, "\"pid\":%d", find(id)->pid);
    } else if (!strcmp(op, "cancel")) {
        cancel(get_integer(header, "job", &missing), frame);
        return 1;
    } else if (!strcmp(op, "window")) {
        change_window(header);
        return 1;
    } else if (!strcmp(op, "connect")) {
        error = connect_to(id, header);
        return error ? error : 1;
    } else if (!strcmp(op, "input")) {
        error = take_input(id, header, frame);
        return error ? error : 1;
    } else if (!strcmp(op, "signal")) {
        struct job *job = running(header);
        if (!job) return -ESRCH;
        if (kill(-job->pid, (int)get_integer(header, "number", &missing))) return -errno;
    } else if (!strcmp(op, "resize")) {
        struct job *job = running(header);
        int64_t rows = get_integer(header, "rows", &missing), columns = get_integer(header, "columns", &missing);
        return !job ? -ESRCH : missing ? -EINVAL : resize_job(job, (int)rows, (int)columns);
    } else if (!strcmp(op, "watch")) {
        char *path;
        error = full_path(header, "path", &path);
        if (error) return error;
        error = add_watch(id, path);
        free(path);
        return error;
    } else if (!strcmp(op, "unwatch")) {
        remove_watch(get_integer(header, "watch", &missing));
    } else if (!strcmp(op, "pause")) {
        pause_all(false);
    } else if (!strcmp(op, "resume")) {
        resume_all();
    } else if (!strcmp(op, "park")) {
        error = park(id, get_integer(header, "stays", &missing));
        return error ? error : 1;
    } else if (!strcmp(op, "processes")) {
        add_processes(fields);
    } else {
        return serve_file(op, header, frame->body, frame->body_size, fields, body);
    }
    return 0;
}

void serve(struct frame frame) {
    struct value *header = parse(frame.head, frame.head_size);
    const char *op = header ? get_text(header, "op") : NULL;
    bool missing = false, is_command = op && (!strcmp(op, "exec") || !strcmp(op, "start"));
    int64_t id = header ? get_integer(header, "id", &missing) : 0;
    if (!op || missing) leave(0); /* the other side does not speak this */
    if (here.paused_at >= 0 && is_command) {
        forget(header);
        hold(frame, false); /* it starts when the sandbox goes on */
        return;
    }
    struct bytes fields = {0}, body = {0};
    int result = header->half ? -EINVAL : dispatch(op, id, header, &frame, &fields, &body);
    if (result < 0) {
        answer_error(id, -result);
    } else if (!result) {
        struct bytes all = {0};
        if (fields.size) add(&all, ",", 1);
        add(&all, fields.data, fields.size);
        add(&all, "", 1);
        answer(id, all.data, body.data, body.size);
        drop(&all);
    }
    drop(&fields);
    drop(&body);
    forget(header);
    free_frame(&frame);
}
