#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SHELL "/bin/bash"
#define SPARE_SCRIPT (32 * 1024)
#define SHOWN 80

/* See venusrl/sandbox/job.py for why the shell starts so. */
#define BOOT "ulimit -u %ld; echo 1000 >/proc/self/oom_score_adj; eval -- \"$(</proc/self/fd/3)\" 3<&-"
#define BOOT_IN "cd -- \"$1\" || exit; shift; " BOOT

extern char **environ;

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* What the shell has in place of descriptors 0 to 3, and what is closed here once it runs. */
struct ends {
    int in, out, err, script;
    const char *terminal;
};

/* In the child, whose memory is the agent's: nothing is changed there. Returns what went wrong. The child moves itself
   to where the agent can freeze it, so that no shell is ever anywhere else when the agent goes on. */
static __attribute__((noinline)) int become_shell(char *const *arguments, char *const *environment,
                                                  const struct ends *ends, int join) {
    struct sigaction usual = {.sa_handler = SIG_DFL};
    sigset_t none;
    if (write(join, "0", 1) != 1) return errno;
    setsid();
    sigaction(SIGPIPE, &usual, NULL);
    sigaction(SIGXFSZ, &usual, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* The shell leads a session, and takes the terminal as its own by opening it. */
    int terminal = ends->terminal ? open(ends->terminal, O_RDWR | O_CLOEXEC) : -1;
    const int from[4] = {ends->in, ends->out, ends->err, ends->script};
    for (int fd = 0; fd < 4; fd++) {
        int source = fd < 3 && ends->terminal ? terminal : from[fd];
        if (source == fd ? fcntl(fd, F_SETFD, 0) : dup2(source, fd) < 0) return errno;
    }
    if (here.apart && (syscall(SYS_setresgid, USER, USER, USER) || syscall(SYS_setresuid, USER, USER, USER)))
        return errno;
    execve(SHELL, arguments, environment);
    return errno;
}

/* Without a copy of this process (vfork), which is another user's where it stands apart. */
static int spawn(pid_t *pid, const char *boot, const char *directory, char **environment, const struct ends *ends,
                 int join) {
    static volatile int failed;
    char *arguments[] = {"bash", "-c", (char *)boot, "bash", (char *)directory, NULL};
    if (!directory) arguments[3] = NULL;
    failed = 0;
    *pid = here.apart ? fork() : vfork();
    if (!*pid) {
        failed = become_shell(arguments, environment, ends, join);
        _exit(127);
    }
    if (*pid < 0) return -errno;
    if (failed) {
        while (waitpid(*pid, NULL, 0) < 0 && errno == EINTR) continue;
        return -failed;
    }
    return 0;
}

/* A file in memory with the data, to be read from its beginning. */
static int in_memory(const char *name, const char *data, size_t size) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) return -errno;
    while (size) {
        ssize_t written = write(fd, data, size);
        if (written < 0) {
            int error = -errno;
            close(fd);
            return error;
        }
        data += written;
        size -= (size_t)written;
    }
    lseek(fd, 0, SEEK_SET);
    return fd;
}

static int open_pipe(int *read_end, int *write_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return -errno;
    *read_end = ends[0];
    *write_end = ends[1];
    return 0;
}

static int open_pipes(struct job *job, const struct value *header, const char *input, size_t size, struct ends *ends) {
    bool missing = false, merged = get_integer(header, "merged", &missing);
    int error = 0;
    if (missing) return -EINVAL;
    if (is(header, "stdin", "pipe")) error = open_pipe(&ends->in, &job->stdin_fd);
    else if (size) ends->in = error = in_memory("stdin", input, size);
    else ends->in = error = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (error < 0) return error == -1 ? -errno : error;
    job->names[0] = merged ? "output" : "stdout";
    error = open_pipe(&job->outputs[0], &ends->out);
    if (!error && !merged) {
        job->names[1] = "stderr";
        error = open_pipe(&job->outputs[1], &ends->err);
    }
    return error;
}

static int open_terminal(struct job *job, const struct value *size, struct ends *ends, char *path) {
    int slave;
    if (size->kind != LIST || size->size != 2) return -EINVAL;
    if (openpty(&job->outputs[0], &slave, path, NULL, NULL)) return -errno;
    fcntl(job->outputs[0], F_SETFD, FD_CLOEXEC);
    fcntl(slave, F_SETFD, FD_CLOEXEC);
    ends->in = slave;
    ends->terminal = path;
    job->names[0] = "pty";
    job->stdin_fd = job->outputs[0];
    job->terminal = true;
    return resize_job(job, (int)size->items[0].integer, (int)size->items[1].integer);
}

static bool overrides(const struct value *environment, const char *entry) {
    for (size_t i = 0; i < environment->size; i++) {
        size_t size = strlen(environment->items[i].key);
        if (!strncmp(entry, environment->items[i].key, size) && entry[size] == '=') return true;
    }
    return false;
}

/* This process's variables, which are those of every command, and the request's in front of them. */
static char **variables(const struct value *environment) {
    struct bytes list = {0};
    for (size_t i = 0; i < environment->size; i++) {
        struct bytes entry = {0};
        const struct value *item = &environment->items[i];
        add(&entry, item->key, strlen(item->key));
        add(&entry, "=", 1);
        add(&entry, item->text ? item->text : "", item->size + 1);
        add(&list, &entry.data, sizeof(char *));
    }
    for (char **entry = environ; *entry; entry++)
        if (!overrides(environment, *entry)) add(&list, entry, sizeof(char *));
    char *end = NULL;
    add(&list, &end, sizeof end);
    return (char **)list.data;
}

static int run(struct job *job, const struct shell *shell, const struct value *header, struct ends *ends) {
    const struct value *environment = get(header, "env"), *directory = get(header, "cwd");
    if (!environment || environment->kind != MAP) return -EINVAL;
    for (size_t i = 0; i < environment->size; i++)
        if (environment->items[i].kind != TEXT) return -EINVAL;
    char boot[256], *cwd = NULL;
    if (directory && directory->kind != NONE) {
        int error = full_path(header, "cwd", &cwd);
        struct stat info;
        if (error) return error;
        if (stat(cwd, &info)) error = -errno;
        else if (!S_ISDIR(info.st_mode)) error = -ENOTDIR;
        const char *given = get_text(header, "cwd");
        free(cwd);
        if (error) return error;
        cwd = (char *)given;
    }
    snprintf(boot, sizeof boot, cwd ? BOOT_IN : BOOT, shell->processes);
    char **all = variables(environment);
    int error = spawn(&job->pid, boot, cwd, all, ends, shell->join);
    for (size_t i = 0; i < environment->size; i++) free(all[i]);
    free(all);
    return error;
}

static void set_nonblocking(int fd) {
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

bool spare_fits(const struct value *header, size_t size) {
    bool missing = false;
    const struct value *environment = get(header, "env"), *cwd = get(header, "cwd");
    return is(header, "op", "exec") && environment && environment->kind == MAP && !environment->size && (!cwd || cwd->kind == NONE) &&
           get_integer(header, "script_bytes", &missing) == (int64_t)size && size <= SPARE_SCRIPT;
}

int start_spare(struct spare *spare, const struct shell *shell) {
    struct ends ends = {-1, -1, -1, -1, NULL};
    char boot[256];
    spare->output = spare->script = -1;
    ends.in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int error = ends.in < 0 ? -errno : open_pipe(&spare->output, &ends.out);
    if (!error) error = open_pipe(&ends.script, &spare->script);
    if (!error) {
        set_nonblocking(spare->script);
        ends.err = ends.out;
        snprintf(boot, sizeof boot, BOOT, shell->processes);
        error = spawn(&spare->pid, boot, NULL, environ, &ends, shell->join);
    }
    close_fd(&ends.in);
    close_fd(&ends.out);
    close_fd(&ends.script);
    if (error) {
        close_spare(spare);
        spare->pid = 0;
    }
    return error;
}

/* It ends, for its script is empty. */
void close_spare(struct spare *spare) {
    close_fd(&spare->output);
    close_fd(&spare->script);
}

static int use_spare(struct job *job, struct spare *spare, const char *script, size_t size) {
    if (size && write(spare->script, script, size) != (ssize_t)size) {
        kill(spare->pid, SIGKILL); /* or it would run half of the script */
        return -EAGAIN;
    }
    close_fd(&spare->script);
    job->outputs[0] = spare->output;
    job->names[0] = "output";
    job->pid = spare->pid;
    return 0;
}

/* Fills in a job that is all zeros. */
int start_job(struct job *job, const struct shell *shell, const struct value *header, char *body, size_t size,
              struct spare *spare) {
    bool missing = false;
    struct ends ends = {-1, -1, -1, -1, NULL};
    char terminal[64];
    const struct value *window = get(header, "window"), *pty = get(header, "pty");
    size_t script = (size_t)get_integer(header, "script_bytes", &missing);
    job->number = get_integer(header, "id", &missing);
    if (missing || script > size) return -EINVAL;
    job->attached = is(header, "op", "exec");
    job->outputs[0] = job->outputs[1] = job->stdin_fd = -1;
    job->timeout_s = get_seconds(header, "timeout_s");
    job->silent_s = get_seconds(header, "silent_s");
    job->follows = window && window->kind == NUMBER;
    job->window = job->follows ? window->integer : 0;
    job->capture.limit = shell->output_bytes;
    job->started = job->last_output = now();
    int error = -EAGAIN;
    if (spare) {
        error = use_spare(job, spare, body, size);
    } else {
        error = ends.script = in_memory("script", body, script);
        if (error >= 0) error = pty && pty->kind != NONE ? open_terminal(job, pty, &ends, terminal)
                                                         : open_pipes(job, header, body + script, size - script, &ends);
        if (!error) {
            if (ends.err < 0) ends.err = ends.out;
            error = run(job, shell, header, &ends);
        }
    }
    if (ends.err != ends.out) close_fd(&ends.err);
    close_fd(&ends.in);
    close_fd(&ends.out);
    close_fd(&ends.script);
    if (error) {
        if (!spare) close_job(job);
        return error;
    }
    set_nonblocking(job->outputs[0]);
    set_nonblocking(job->outputs[1]);
    set_nonblocking(job->stdin_fd);
    struct bytes shown = {0};
    add(&shown, body, script <= SHOWN ? script : whole_end(body, SHOWN));
    if (script > SHOWN) add(&shown, "...", 3);
    job->script_size = shown.size;
    job->script = take_string(shown.data ? shown.data : "", shown.size);
    drop(&shown);
    return 0;
}

/* The owner follows its output and takes no more now. */
bool is_held(const struct job *job) { return job->follows && job->window <= 0; }

double due(const struct job *job) {
    double time = job->timeout_s >= 0 ? job->started + job->timeout_s : INFINITY;
    if (job->silent_s >= 0 && !is_held(job)) time = fmin(time, job->last_output + job->silent_s);
    return isinf(time) ? -1 : time;
}

ssize_t read_job(struct job *job, int at, char *buffer, size_t room) {
    ssize_t got;
    if (job->terminal) touch(buffer, room); /* a terminal forgets what it could not hand over */
    do got = read(job->outputs[at], buffer, room);
    while (got < 0 && again());
    if (got < 0 && errno == EAGAIN) return -EAGAIN;
    if (got > 0) {
        keep(&job->capture, buffer, (size_t)got);
        job->last_output = now();
        return got;
    }
    if (job->terminal) job->stdin_fd = -1; /* nobody has it open any more */
    close_fd(&job->outputs[at]);
    return 0;
}

static ssize_t write_patiently(int fd, const char *data, size_t size) {
    ssize_t written;
    do written = write(fd, data, size);
    while (written < 0 && again());
    return written;
}

/* Writes the first of what is unsent: 1 when all of it is written, 0 when there is no room, or -errno. */
static int write_first(struct job *job, struct input *input) {
    if (job->stdin_fd < 0) return -EPIPE;
    if (!input->data) {
        if (job->terminal) {
            ssize_t ended = write_patiently(job->stdin_fd, "\x04", 1);
            return ended == 1 ? 1 : errno == EAGAIN ? 0 : -errno;
        }
        close_fd(&job->stdin_fd);
        return 1;
    }
    ssize_t written = write_patiently(job->stdin_fd, input->data + input->done, input->size - input->done);
    if (written < 0) return errno == EAGAIN ? 0 : -errno;
    input->done += (size_t)written;
    return input->done == input->size;
}

void write_job(struct job *job, void (*done)(int64_t, int)) {
    while (job->unsent) {
        struct input *input = job->unsent;
        int result = write_first(job, input);
        if (!result) return;
        job->unsent = input->next;
        done(input->request, result < 0 ? -result : 0);
        free(input->data);
        free(input);
    }
}

int resize_job(struct job *job, int rows, int columns) {
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    if (!job->terminal || job->stdin_fd < 0) return -ENOTTY;
    return ioctl(job->stdin_fd, TIOCSWINSZ, &size) ? -errno : 0;
}

/* Closes what is open of its input and output. */
void close_job(struct job *job) {
    if (!job->terminal) close_fd(&job->stdin_fd);
    job->stdin_fd = -1;
    close_fd(&job->outputs[0]);
    close_fd(&job->outputs[1]);
}
