#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORKSPACE "/workspace"
#define CHUNK (4 << 20)
#define MOST_ENTRIES 100000

/* The path that a request gives, relative to the workspace; the caller frees it. */
int full_path(const struct value *header, const char *key, char **path) {
    const struct value *given = get(header, key);
    if (!given || given->kind != TEXT || strlen(given->text) != given->size) return -EINVAL;
    struct bytes full = {0};
    if (given->text[0] != '/') add(&full, WORKSPACE "/", sizeof WORKSPACE);
    add(&full, given->text, given->size + 1);
    *path = full.data;
    return 0;
}

/* Only regular files: a FIFO or a device that a command has made must not hold up the agent. */
static int regular(int fd, struct stat *info) {
    if (fstat(fd, info)) return -errno;
    if (S_ISDIR(info->st_mode)) return -EISDIR;
    return S_ISREG(info->st_mode) ? 0 : -EINVAL;
}

static int read_file(const char *path, const struct value *header, struct bytes *data) {
    bool missing = false;
    int64_t offset = get_integer(header, "offset", &missing), most = get_integer(header, "max_bytes", &missing);
    if (missing) return -EINVAL;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return -errno;
    struct stat info;
    int error = regular(fd, &info);
    if (!error && info.st_size > most) error = -EFBIG;
    if (!error) data->data = take(data->room = CHUNK);
    /* What is read at once may be less than there is: of /proc, or where a page for it lacks. */
    for (ssize_t got = 1; !error && got && data->size < CHUNK; ) {
        got = pread(fd, data->data + data->size, CHUNK - data->size, offset + (off_t)data->size);
        if (got >= 0) data->size += (size_t)got;
        else if (errno != EFAULT || !again()) error = -errno;
    }
    close(fd);
    return error;
}

static int make_parents(char *path) {
    for (char *at = path + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        int failed = mkdir(path, 0777) ? errno : 0;
        struct stat info;
        if (failed && !stat(path, &info)) failed = S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
        *at = '/';
        if (failed) return -failed;
    }
    return 0;
}

static int write_file(char *path, const struct value *header, const char *body, size_t size) {
    bool missing = false;
    const struct value *given = get(header, "mode"); /* null: as it is, or what is usual for a new one */
    bool keeps = given && given->kind == NONE;
    int64_t offset = get_integer(header, "offset", &missing), mode = keeps ? 0 : get_integer(header, "mode", &missing);
    if (missing) return -EINVAL;
    int error = offset ? 0 : make_parents(path);
    if (error) return error;
    int fd = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC | O_NOCTTY, keeps ? 0644 : 0600);
    if (fd < 0) return -errno;
    struct stat info;
    error = regular(fd, &info);
    if (!error && !offset && (ftruncate(fd, 0) || (!keeps && fchmod(fd, (mode_t)mode)))) error = -errno;
    while (!error && size) {
        ssize_t written = pwrite(fd, body, size, offset);
        if (written < 0) {
            error = -errno;
        } else {
            body += written;
            size -= (size_t)written;
            offset += written;
        }
    }
    close(fd);
    return error;
}

static const char *type_of(mode_t mode) {
    return S_ISREG(mode) ? "file" : S_ISDIR(mode) ? "dir" : S_ISLNK(mode) ? "link" : "other";
}

static void add_entry(struct bytes *to, const char *name, size_t size, const struct stat *info) {
    add(to, "[", 1);
    add_text(to, name, size);
    addf(to, ",\"%s\",%lld,%u,%.17g]", type_of(info->st_mode), (long long)info->st_size, info->st_mode & 07777u,
         (double)info->st_mtim.tv_sec + 1e-9 * (double)info->st_mtim.tv_nsec);
}

static int stat_file(const char *path, struct bytes *answer) {
    struct stat info;
    if (lstat(path, &info)) return -errno;
    size_t end = strlen(path);
    while (end && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin && path[begin - 1] != '/') begin--;
    add(answer, "\"entry\":", 8);
    if (begin == end) add_entry(answer, "/", 1, &info);
    else add_entry(answer, path + begin, end - begin, &info);
    return 0;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int list_names(DIR *directory, struct bytes *names) {
    size_t count = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(directory)); errno = 0) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (count++ == MOST_ENTRIES) return -EFBIG;
        char *name = take_string(entry->d_name, strlen(entry->d_name));
        add(names, &name, sizeof name);
    }
    return -errno;
}

static int list_files(const char *path, struct bytes *answer) {
    DIR *directory = opendir(path);
    if (!directory) return -errno;
    struct bytes list = {0};
    int error = list_names(directory, &list);
    char **names = (char **)list.data;
    size_t count = list.size / sizeof *names;
    if (count) qsort(names, count, sizeof *names, by_name);
    add(answer, "\"entries\":[", 11);
    bool first = true;
    for (size_t i = 0; i < count; i++) {
        struct stat info;
        if (!fstatat(dirfd(directory), names[i], &info, AT_SYMLINK_NOFOLLOW)) {
            if (!first) add(answer, ",", 1);
            add_entry(answer, names[i], strlen(names[i]), &info);
            first = false;
        } else if (errno != ENOENT) {
            error = -errno;
        }
        free(names[i]);
    }
    add(answer, "]", 1);
    drop(&list);
    closedir(directory);
    return error;
}

int serve_file(const char *op, const struct value *header, const char *body, size_t size, struct bytes *answer,
               struct bytes *data) {
    char *path;
    int error = full_path(header, "path", &path);
    if (error) return error;
    if (!strcmp(op, "read")) error = read_file(path, header, data);
    else if (!strcmp(op, "write")) error = write_file(path, header, body, size);
    else if (!strcmp(op, "list")) error = list_files(path, answer);
    else if (!strcmp(op, "stat")) error = stat_file(path, answer);
    else error = -ENOSYS;
    free(path);
    return error == -EFAULT ? -ENOMEM : error; /* there was no page for what the kernel says */
}
