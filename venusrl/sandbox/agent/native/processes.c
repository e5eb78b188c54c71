#include "agent.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct process {
    pid_t pid, parent, session;
};

static bool look_at(pid_t pid, struct process *process) {
    char path[64], text[1024], state;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd;
    do fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd < 0 && again());
    if (fd < 0) return false;
    ssize_t size;
    do size = read(fd, text, sizeof text - 1);
    while (size < 0 && again());
    close(fd);
    if (size <= 0) return false;
    text[size] = 0;
    const char *fields = strrchr(text, ')'); /* a name may hold anything */
    process->pid = pid;
    return fields && sscanf(fields, ") %c %d %*d %d", &state, &process->parent, &process->session) == 3 && state != 'Z';
}

static bool among(pid_t pid, const pid_t *roots, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (roots[i] == pid) return true;
    return false;
}

static bool belongs(pid_t pid, const struct process *all, size_t count, const pid_t *roots, size_t root_count) {
    for (size_t hops = 0; hops <= count; hops++) {
        const struct process *process = NULL;
        for (size_t i = 0; i < count && !process; i++)
            if (all[i].pid == pid) process = &all[i];
        if (!process) return false;
        if (among(pid, roots, root_count) || among(process->session, roots, root_count)) return true;
        pid = process->parent;
    }
    return false;
}

/* Or NULL at the end. What cannot be looked at for want of memory is waited for: it is not gone. */
static struct dirent *next_entry(DIR *directory) {
    struct dirent *entry;
    do {
        errno = 0;
        entry = readdir(directory);
    } while (!entry && errno && again());
    return entry;
}

/* Processes that belong to none of the commands whose shells are `roots`; the caller frees them. */
size_t processes_outside(const pid_t *roots, size_t count, pid_t **found) {
    struct bytes all = {0}, outside = {0};
    DIR *directory;
    do directory = opendir("/proc");
    while (!directory && again());
    for (struct dirent *entry; directory && (entry = next_entry(directory)); ) {
        struct process process;
        pid_t pid = (pid_t)atoi(entry->d_name);
        if (isdigit((unsigned char)entry->d_name[0]) && pid != getpid() && look_at(pid, &process))
            add(&all, &process, sizeof process);
    }
    if (directory) closedir(directory);
    const struct process *processes = (const struct process *)all.data;
    size_t total = all.size / sizeof *processes;
    for (size_t i = 0; i < total; i++)
        if (!belongs(processes[i].pid, processes, total, roots, count))
            add(&outside, &processes[i].pid, sizeof(pid_t));
    drop(&all);
    *found = (pid_t *)outside.data;
    return outside.size / sizeof(pid_t);
}

bool exists(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d", pid);
    int failed;
    do failed = access(path, F_OK);
    while (failed && again());
    return !failed || errno != ENOENT;
}
