#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#define WATCHED (IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | \
                 IN_MOVE_SELF)

/* One who asked. Several may have asked for one inode, and then have the kernel's same number. */
struct watch {
    int64_t watch;
    int number;
    char *path;
    struct bytes events;
    struct watch *next;
};

static int inotify = -1;
static struct watch *watches;

int watch_fd(void) { return inotify; }

static int ask_kernel(const char *path) {
    if (inotify < 0) inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    int number = inotify < 0 ? -1 : inotify_add_watch(inotify, path, WATCHED);
    return number < 0 ? -errno : number;
}

int add_watch(int64_t watch, const char *path) {
    int number = ask_kernel(path);
    if (number < 0) return number;
    struct watch *new = take(sizeof *new);
    *new = (struct watch){watch, number, take_string(path, strlen(path)), {0}, watches};
    watches = new;
    return 0;
}

static void free_watch(struct watch *watch) {
    drop(&watch->events);
    free(watch->path);
    free(watch);
}

static bool is_watched(int number) {
    for (struct watch *watch = watches; watch; watch = watch->next)
        if (watch->number == number) return true;
    return false;
}

void remove_watch(int64_t wanted) {
    for (struct watch **at = &watches; *at; ) {
        struct watch *watch = *at;
        if (watch->watch != wanted) {
            at = &watch->next;
            continue;
        }
        *at = watch->next;
        if (watch->number >= 0 && !is_watched(watch->number)) inotify_rm_watch(inotify, watch->number);
        free_watch(watch);
    }
}

static const char *kind_of(uint32_t mask) {
    if (mask & (IN_Q_OVERFLOW | IN_IGNORED)) return "lost";
    if (mask & IN_MODIFY) return "write";
    if (mask & IN_ATTRIB) return "chmod";
    if (mask & (IN_MOVED_FROM | IN_MOVE_SELF)) return "move_from";
    if (mask & IN_MOVED_TO) return "move_to";
    if (mask & IN_CREATE) return "create";
    return mask & (IN_DELETE | IN_DELETE_SELF) ? "remove" : NULL;
}

void read_watches(void (*tell)(int64_t, const char *)) {
    static char buffer[65536] __attribute__((aligned(8)));
    ssize_t size;
    touch(buffer, sizeof buffer); /* the kernel forgets what it could not hand over */
    do size = read(inotify, buffer, sizeof buffer);
    while (size < 0 && again());
    for (char *at = buffer; at < buffer + (size > 0 ? size : 0); ) {
        const struct inotify_event *event = (const struct inotify_event *)at;
        const char *kind = kind_of(event->mask), *name = event->len ? event->name : "";
        at += sizeof *event + event->len;
        for (struct watch *watch = watches; kind && watch; watch = watch->next) {
            if (!(event->mask & IN_Q_OVERFLOW) && watch->number != event->wd) continue;
            addf(&watch->events, "%s[\"%s\",", watch->events.size ? "," : "", kind);
            add_text(&watch->events, name, strlen(name));
            add(&watch->events, "]", 1);
            if (event->mask & IN_IGNORED) watch->number = -1;
        }
    }
    for (struct watch *watch = watches; watch; watch = watch->next)
        if (watch->events.size) {
            add(&watch->events, "", 1);
            tell(watch->watch, watch->events.data);
            drop(&watch->events);
        }
}

/* They stay on record. */
void close_watches(void) {
    if (inotify >= 0) close(inotify);
    inotify = -1;
}

/* Those on record again; what has changed meanwhile is not known. */
void open_watches(void (*tell)(int64_t, const char *)) {
    for (struct watch *watch = watches; watch; watch = watch->next) {
        watch->number = ask_kernel(watch->path);
        tell(watch->watch, "[\"lost\",\"\"]");
    }
}
