/* The first process of a guest. It has everything; the agent that it starts, and all that comes of that, have nothing.

   It loads the modules, waits on the port "control" for what the sandbox is to be, starts the agent on the port
   "agent", and then serves the machine's owner: after a clone, the time and randomness that is nobody else's. When the
   agent ends, so does the machine.

   Ports are virtio ones with these names; or, where the kernel's command line has ports=vsock, vsock's 1 and 2, which
   listen, since a connection does not outlive a snapshot there. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/random.h>
#include <linux/seccomp.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define USER 1000
#define MOST_CONFIGURATION (1 << 20)
#define ENTROPY 32

static void die(const char *what) {
    fprintf(stderr, "guest: %s: %s\n", what, strerror(errno));
    sync();
    reboot(RB_POWER_OFF);
    _exit(1);
}

static void mount_at(const char *kind, const char *target, unsigned long flags, const char *options) {
    mkdir(target, 0755);
    if (mount(kind, target, kind, flags, options)) die(target);
}

/* Where the owner comes from, one connection after the other; -1: a port that is always there. */
static int control_listener = -1;

static bool has_vsock(void) {
    char line[4096] = "";
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, line, sizeof line - 1) < 0) die("cmdline");
    close(fd);
    return strstr(line, "ports=vsock");
}

static int listen_on(unsigned int port) {
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = VMADDR_CID_ANY};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1)) die("vsock");
    return fd;
}

static int take_owner(void) {
    int fd;
    do fd = accept4(control_listener, NULL, NULL, SOCK_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) die("accept");
    return fd;
}

static void load_modules(const char *ports) {
    FILE *list = fopen(ports, "r");
    char name[256], path[300];
    while (list && fgets(name, sizeof name, list)) {
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST)) die(path);
        close(fd);
    }
    if (list) fclose(list);
}

/* The device of the port with that name, once it is there. */
static int open_port(const char *wanted) {
    for (int tries = 0; tries < 2000; tries++, usleep(5000)) {
        DIR *ports = opendir("/sys/class/virtio-ports");
        for (struct dirent *entry; ports && (entry = readdir(ports)); ) {
            char path[300], name[64] = "";
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            if (fd < 0) continue;
            ssize_t size = read(fd, name, sizeof name - 1);
            close(fd);
            name[size > 0 ? strcspn(name, "\n") : 0] = 0;
            if (strcmp(name, wanted)) continue;
            snprintf(path, sizeof path, "/dev/%s", entry->d_name);
            closedir(ports);
            fd = open(path, O_RDWR | O_CLOEXEC);
            if (fd < 0) die(path);
            return fd;
        }
        if (ports) closedir(ports);
    }
    errno = ENODEV;
    die(wanted);
    return -1;
}

static void read_exactly(int *fd, char *to, size_t size) {
    for (size_t have = 0; have < size;) {
        ssize_t got = read(*fd, to + have, size - have);
        if (got > 0) {
            have += (size_t)got;
        } else if (got < 0 && errno == EINTR) {
            continue;
        } else if (control_listener >= 0) { /* the next says it again, from the beginning */
            close(*fd);
            *fd = take_owner();
            have = 0;
        } else if (got < 0 && errno != EAGAIN) {
            die("control");
        } else {
            usleep(2000); /* nobody is connected */
        }
    }
}

static void write_word(int fd, const char *word) {
    if (write(fd, word, 2) != 2 && control_listener < 0) die("control");
}

/* What the owner sends first: its length, then texts that each end with a NUL. */
static char **configuration(int *control) {
    uint32_t size;
    read_exactly(control, (char *)&size, sizeof size);
    char *data = size <= MOST_CONFIGURATION ? malloc(size + 1) : NULL;
    char **texts = calloc(size + 2, sizeof *texts);
    if (!data || !texts) die("configuration");
    read_exactly(control, data, size);
    data[size] = 0;
    size_t count = 0;
    for (char *at = data; at < data + size; at += strlen(at) + 1) texts[count++] = at;
    return texts;
}

static void own_directory(const char *from, const char *to, mode_t mode) {
    mkdir(from, mode);
    mkdir(to, 0755);
    if (chown(from, USER, USER) || chmod(from, mode) || mount(from, to, NULL, MS_BIND, NULL)) die(to);
}

static void make_disk(const char *bytes) {
    char options[128];
    snprintf(options, sizeof options, "size=%s,nr_inodes=100000,mode=700", bytes);
    mount_at("tmpfs", "/disk", MS_NOSUID | MS_NODEV, options);
    own_directory("/disk/workspace", "/workspace", 0755);
    own_directory("/disk/tmp", "/tmp", 01777);
    own_directory("/disk/shm", "/dev/shm", 01777);
}

static void limit(int what, uint64_t value) {
    struct rlimit both = {value, value};
    if (setrlimit(what, &both)) die("setrlimit");
}

static void drop_everything(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    for (int capability = 0; capability < 64; capability++) prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
    if (syscall(SYS_setgroups, 0, NULL) || setresgid(USER, USER, USER) || setresuid(USER, USER, USER)) die("user");
    if (syscall(SYS_capset, &header, none)) die("capset");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) die("no_new_privs");
}

static bool put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return done;
}

/* A group of what commands are, that the agent can freeze, and one above it that this process moves into: as
   venusrl/sandbox/spawner/freezer.py has it. Descriptors as the agent wants them, or -1 where the kernel has no groups. */
static void open_freezer(int fds[3]) {
    fds[0] = fds[1] = fds[2] = -1;
    mkdir("/cgroup", 0700);
    if (mount("none", "/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) return;
    if (!mkdir("/cgroup/sandbox", 0755) && !mkdir("/cgroup/sandbox/commands", 0755) &&
        put("/cgroup/sandbox/commands/cgroup.type", "threaded") && put("/cgroup/sandbox/cgroup.procs", "0")) {
        fds[0] = open("/cgroup/sandbox/commands/cgroup.freeze", O_RDWR);
        fds[1] = open("/cgroup/sandbox/commands/cgroup.events", O_RDONLY);
        fds[2] = open("/cgroup/sandbox/commands/cgroup.threads", O_WRONLY);
        if (fds[0] < 0 || fds[1] < 0 || fds[2] < 0) die("freezer");
    }
    umount2("/cgroup", MNT_DETACH);
    rmdir("/cgroup");
}

/* The filter of system calls is the one of process sandboxes, from a file. */
static void filter_calls(void) {
    static struct sock_filter instructions[4096];
    int fd = open("/filter", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, instructions, sizeof instructions);
    struct sock_fprog program = {(unsigned short)(size / (ssize_t)sizeof *instructions), instructions};
    if (size <= 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) die("filter");
    close(fd);
}

/* texts: bytes of the disk, processes, bytes of a file, bytes kept of an output, then variables. */
static pid_t start_agent(char **texts, int port) {
    int life[2];
    if (pipe(life)) die("pipe"); /* this process holds the other end for ever */
    if (unshare(CLONE_NEWPID | CLONE_NEWIPC)) die("unshare");
    pid_t pid = fork();
    if (pid) {
        close(life[0]);
        return pid;
    }
    close(life[1]);
    setsid();
    umask(022);
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("mounts");
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) die("proc");
    limit(RLIMIT_CORE, 1);
    limit(RLIMIT_FSIZE, strtoull(texts[2], NULL, 10));
    limit(RLIMIT_NOFILE, 4096);
    int kills = open("/proc/vmstat", O_RDONLY); /* the kernel's count, of the whole guest */
    int freezer[3];
    open_freezer(freezer);
    drop_everything();
    filter_calls();
    char fds[6][16];
    snprintf(fds[0], sizeof fds[0], "%d", dup(port)); /* one that stays open */
    snprintf(fds[1], sizeof fds[1], "%d", life[0]);
    snprintf(fds[2], sizeof fds[2], "%d", kills);
    for (int i = 0; i < 3; i++) snprintf(fds[3 + i], sizeof fds[3 + i], "%d", freezer[i]);
    char *arguments[] = {"agent", fds[0], fds[1], fds[2], fds[3], fds[4], fds[5], texts[1], texts[3], NULL};
    execve("/opt/agent", arguments, texts + 4);
    die("agent");
    return -1;
}

/* After a clone: the time, and entropy. */
static void refresh(const char *message) {
    struct {
        struct rand_pool_info info;
        char entropy[ENTROPY];
    } pool = {.info = {.entropy_count = ENTROPY * 8, .buf_size = ENTROPY}};
    struct timespec now;
    uint64_t nanoseconds;
    memcpy(&nanoseconds, message, sizeof nanoseconds);
    memcpy(pool.info.buf, message + sizeof nanoseconds, ENTROPY);
    now.tv_sec = (time_t)(nanoseconds / 1000000000u);
    now.tv_nsec = (long)(nanoseconds % 1000000000u);
    clock_settime(CLOCK_REALTIME, &now);
    int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (random < 0 || ioctl(random, RNDADDENTROPY, &pool) || ioctl(random, RNDRESEEDCRNG)) die("entropy");
    close(random);
}

static void end(int signal) {
    (void)signal;
    while (waitpid(-1, NULL, WNOHANG) > 0) reboot(RB_POWER_OFF);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    mount_at("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    int overcommit = open("/proc/sys/vm/overcommit_memory", O_WRONLY | O_CLOEXEC); /* as under a cgroup */
    if (overcommit < 0 || write(overcommit, "1", 1) != 1) die("overcommit");
    close(overcommit);
    mount_at("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    mount_at("devtmpfs", "/dev", MS_NOSUID, NULL);
    mount_at("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "ptmxmode=0666,mode=620,max=64");
    symlink("/proc/self/fd", "/dev/fd");
    symlink("/proc/self/fd/0", "/dev/stdin");
    symlink("/proc/self/fd/1", "/dev/stdout");
    symlink("/proc/self/fd/2", "/dev/stderr");
    chmod("/dev/ptmx", 0666);
    chmod("/", 0755);
    bool vsock = has_vsock();
    load_modules(vsock ? "/modules/vsock" : "/modules/serial");
    sethostname("sandbox", 7);
    struct ifreq lo = {.ifr_flags = IFF_UP};
    strcpy(lo.ifr_name, "lo");
    int network = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (network < 0 || ioctl(network, SIOCSIFFLAGS, &lo)) die("loopback");
    close(network);
    int agent = vsock ? listen_on(2) : -1;
    if (vsock) control_listener = listen_on(1);
    int control = vsock ? take_owner() : open_port("control");
    write_word(control, "up");
    char **texts = configuration(&control);
    make_disk(texts[0]);
    if (!vsock) agent = open_port("agent");
    umount2("/sys", MNT_DETACH);
    signal(SIGCHLD, end);
    start_agent(texts, agent);
    for (char message[8 + ENTROPY];;) {
        read_exactly(&control, message, sizeof message);
        refresh(message);
        write_word(control, "ok");
    }
}
