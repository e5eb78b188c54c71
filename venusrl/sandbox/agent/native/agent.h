/* The agent, process 1 of a sandbox, as a program of its own: what venusrl/sandbox/agent.py does, in less memory.

   The Python agent says what each request means; the two are held to the same tests. Here a request is parsed into a
   tree of values that lives as long as the request is served; answers are written as text. Every function that can
   fail returns a negative errno. Memory that cannot be had ends the agent, and with it the sandbox. */

#ifndef VENUSRL_AGENT_H
#define VENUSRL_AGENT_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define USER 1000 /* of commands, as rootfs.USER_ID */
#define MOST_OLD_PIPES 32 /* kept open for background processes, so that writing does not kill them */

/* memory.c: memory, or the end; and bytes that grow */

struct bytes {
    char *data;
    size_t size, room;
};

/* Whether to make a call again that has failed: it was interrupted, or lacked memory, and there may be some now. */
bool again(void);
void touch(void *memory, size_t size);
void *take(size_t size);
void *resized(void *memory, size_t size);
char *take_string(const char *text, size_t size);
void add(struct bytes *to, const void *data, size_t size);
void addf(struct bytes *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
void drop(struct bytes *bytes);

/* json.c: the headers of frames. Text is bytes; what is not UTF-8 travels as lone surrogates, as Python has it. */

enum kind { NONE, BOOL, NUMBER, TEXT, LIST, MAP };

struct value {
    enum kind kind;
    char *key; /* within a MAP */
    size_t key_size;
    char *text; /* of a TEXT, ended by a NUL; it may hold others */
    size_t size; /* bytes of a TEXT, items of a LIST or MAP */
    bool is_whole; /* `integer` is its value */
    int64_t integer;
    double number;
    struct value *items;
    bool half; /* of what was parsed: it holds half of a character, which is no text */
};

struct value *parse(const char *text, size_t size); /* NULL: it is no JSON */
void forget(struct value *value);
const struct value *get(const struct value *map, const char *key); /* NULL where there is none */
int64_t get_integer(const struct value *map, const char *key, bool *missing);
double get_seconds(const struct value *map, const char *key); /* negative where it is null or missing */
const char *get_text(const struct value *map, const char *key);
bool is(const struct value *map, const char *key, const char *text);
void add_text(struct bytes *to, const char *data, size_t size); /* with its quotes */
void add_shown(struct bytes *to, const char *data, size_t size); /* what is no text is replaced */

/* wire.c: frames on a socket, or a port of a virtual machine. Both end the agent when the other side is gone. */

struct frame {
    char *head, *body;
    size_t head_size, body_size;
};

#define MOST_HEAD (16u << 20) /* as wire.py has it */

struct frame receive(int fd);
void send_frame(int fd, const struct bytes *head, const char *body, size_t body_size);

/* characters.c: UTF-8 */

size_t utf8_size(const unsigned char *at, size_t left); /* bytes of the character there; 0: it is none */
size_t whole_end(const char *data, size_t size); /* bytes of it without the beginning of a character at its end */
size_t whole_start(const char *data, size_t size); /* bytes at its beginning that are the end of a character */

/* output.c: the head and the tail of a stream of any length */

struct capture {
    size_t limit;
    uint64_t total;
    struct bytes head, tail;
};

void keep(struct capture *capture, const char *data, size_t size);
struct bytes kept(const struct capture *capture);

/* job.c: one command: its shell, its pipes or terminal, its deadlines */

struct input {
    int64_t request;
    char *data; /* NULL: the end of it */
    size_t size, done;
    struct input *next;
};

struct job {
    int64_t number; /* of the request that started it */
    bool attached; /* the request is answered when it ends */
    pid_t pid;
    int outputs[2]; /* descriptors, or -1 */
    const char *names[2];
    int stdin_fd;
    bool terminal; /* outputs[0] and stdin_fd are one */
    struct input *unsent;
    bool follows; /* the owner takes `window` more bytes of its output */
    int64_t window;
    struct capture capture;
    double started, last_output, timeout_s, silent_s; /* seconds; negative: none */
    int64_t oom_kills; /* of the sandbox, before it started */
    bool ended;
    int status; /* of waitpid */
    const char *stopped; /* why it was ended: "deadline", "silent", "cancelled" */
    char *script; /* the beginning of it, which ends in "..." where there is more */
    size_t script_size;
    struct job *next;
};

struct spare {
    pid_t pid; /* 0: there is none */
    int output, script;
};

/* What every shell is started with. */
struct shell {
    long processes; /* its limit of them */
    int join; /* descriptor by which it joins what can be frozen */
    size_t output_bytes;
};

double now(void);
int start_job(struct job *job, const struct shell *shell, const struct value *header, char *body, size_t size,
              struct spare *spare);
int start_spare(struct spare *spare, const struct shell *shell);
bool spare_fits(const struct value *header, size_t size);
void close_spare(struct spare *spare);
bool is_held(const struct job *job);
double due(const struct job *job); /* negative: never */
ssize_t read_job(struct job *job, int at, char *buffer, size_t room); /* -EAGAIN: nothing now; 0: its end */
/* Writes what fits. Calls `done` for every request that is over. */
void write_job(struct job *job, void (*done)(int64_t request, int error));
int resize_job(struct job *job, int rows, int columns);
void close_job(struct job *job);

/* What the agent has now. */
struct state {
    int control; /* to the owner: a socket, or a port of a virtual machine */
    int listener; /* where owners come from, one after the other, or -1: there is one for ever */
    int life; /* ends when the spawner does */
    int oom; /* counts the kernel's kills, or -1 */
    bool apart; /* it is of another user than its commands */
    struct shell shell;
    struct job *jobs;
    struct spare spare;
    double spare_until, paused_at; /* negative: it is not paused */
    int old_pipes[MOST_OLD_PIPES], old_pipe_count;
};

extern struct state here;

/* answers.c */

void answer(int64_t request, const char *fields, const char *body, size_t size);
void answer_error(int64_t request, int error);
void say(const char *text);
void tell_events(int64_t watch, const char *events);

/* commands.c: from a command's begin to its end */

/* How a started command ended. */
struct end {
    int64_t number;
    struct bytes head, output;
};

int begin(const struct value *header, struct frame *frame);
int64_t oom_kills(void); /* of the sandbox, so far */
struct job *find(int64_t number);
struct job *running(const struct value *header);
struct end *find_end(int64_t number);
void signal_all(int number);
bool reap(void);
void drop_spare(void);
void drain_old(int fd);
void set_window(struct job *job, bool follows, int64_t window);
size_t move_output(struct job *job, int at);
void finish(struct job *job);
void stop(struct job *job, const char *why);

/* freezer.c: how commands stand still */

void take_freezer(const int fds[3]);
void drop_freezer(void);
bool freezer_holds(void);
bool freeze(void);
void thaw(void);
void leave(int code) __attribute__((noreturn));

/* loopback.c: not of the agent; what this program is besides */

int raise_loopback(const char *pid);

/* requests.c */

void serve(struct frame frame);

/* files.c: requests about files, as the sandbox's user sees them */

int serve_file(const char *op, const struct value *header, const char *body, size_t size, struct bytes *answer,
               struct bytes *data);
int full_path(const struct value *header, const char *key, char **path);

/* processes.c */

size_t processes_outside(const pid_t *roots, size_t count, pid_t **found);
bool exists(pid_t pid);

/* watch.c: changes of files. Calls `tell` with the text of a list of events for everyone who asked. */

int watch_fd(void); /* -1: nothing is watched */
int add_watch(int64_t watch, const char *path);
void remove_watch(int64_t watch);
void read_watches(void (*tell)(int64_t watch, const char *events));
void close_watches(void);
void open_watches(void (*tell)(int64_t watch, const char *events));

/* berth.c: how the agent lets go of everything outside, and is found again; see venusrl/sandbox/berth.py */

#define MOST_FDS 5 /* the spawner's life, three of the freezer, the cgroup's kills */
int open_berth(char *name_hex, size_t room);
int wait_at_berth(int listener, char *greeting, int fds[MOST_FDS], int *count); /* the new socket */
int accept_owner(int listener);

#endif
