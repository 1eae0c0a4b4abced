/* The file system of a sandbox: read-only binds, an overlay at the work directory, one size-capped tmpfs for
 * everything that can be written. All mounts live in the new mount namespace and vanish with PID 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "sandboxd.h"
#include "sys.h"

#define SCRATCH ".scratch" /* only while building: detached at the end, so that no command sees upper or work */

static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
#define NUM_DEVICES (sizeof devices / sizeof *devices)

/* "/a/b" -> "a/b": everything is built relative to the new root. */
static const char *inside(const char *path) {
    while (*path == '/') path++;
    return *path ? path : ".";
}

static void make_parents(const char *path) {
    char part[4096];
    if (strlen(path) >= sizeof part) {
        errno = ENAMETOOLONG;
        fail("path");
    }
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = 0;
        if (mkdir(part, 0755) && errno != EEXIST && errno != EROFS) fail(part);
    }
}

/* A detached, private copy of a host mount. Taken before anything of the host is covered. */
static int clone_tree(const char *path, uint64_t attributes, int map_fd) {
    int fd = sys_open_tree(AT_FDCWD, path, SWE_TREE_CLONE | SWE_TREE_CLOEXEC | SWE_AT_RECURSIVE);
    if (fd < 0) fail(path);
    if (sys_mount_setattr(fd, SWE_AT_RECURSIVE, attributes, 0)) fail(path);
    if (map_fd >= 0 && sys_mount_setattr(fd, 0, SWE_ATTR_IDMAP, (uint64_t)map_fd)) {
        close(fd); /* not every file system can; the caller gives the files away by copying instead */
        return -1;
    }
    return fd;
}

static void attach(int tree, const char *target) {
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, target, SWE_MOVE_EMPTY_FROM)) fail(target);
    close(tree);
}

static void attach_at_new(int tree, const char *target) {
    struct stat info;
    if (fstat(tree, &info)) fail(target);
    make_parents(target);
    if (S_ISDIR(info.st_mode)) {
        if (mkdir(target, 0755) && errno != EEXIST && errno != EROFS) fail(target);
    } else {
        int fd = open(target, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
        if (fd < 0 && errno != EROFS && errno != EACCES) fail(target);
        if (fd >= 0) close(fd);
    }
    attach(tree, target);
}

static int new_filesystem(const char *type, const char *const (*options)[2], uint64_t attributes) {
    int context = (int)syscall(SYS_fsopen, type, SWE_FSOPEN_CLOEXEC);
    if (context < 0) fail(type);
    for (; options && (*options)[0]; options++)
        if (syscall(SYS_fsconfig, context, SWE_FSCONFIG_SET_STRING, (*options)[0], (*options)[1], 0)) fail(type);
    if (syscall(SYS_fsconfig, context, SWE_FSCONFIG_CREATE, NULL, NULL, 0)) fail(type);
    int fd = (int)syscall(SYS_fsmount, context, 1 /* FSMOUNT_CLOEXEC */, attributes);
    if (fd < 0) fail(type);
    close(context);
    return fd;
}

static int new_tmpfs(uint64_t size, uint64_t inodes) {
    char bytes[32], files[32];
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)size);
    snprintf(files, sizeof files, "%llu", (unsigned long long)inodes);
    const char *const options[][2] = {{"size", bytes}, {"nr_inodes", files}, {"mode", "0755"}, {NULL, NULL}};
    return new_filesystem("tmpfs", options, SWE_ATTR_NOSUID | SWE_ATTR_NODEV);
}

static void give(const struct sandbox *box, const char *path) {
    if (box->id.real_root && lchown(path, OUTSIDE_COMMAND, OUTSIDE_COMMAND)) fail(path);
}

static void bind_scratch(const struct sandbox *box, const char *name, const char *target, mode_t mode) {
    char path[64];
    snprintf(path, sizeof path, SCRATCH "/%s", name);
    if (mkdir(path, mode) || chmod(path, mode)) fail(path);
    give(box, path);
    attach_at_new(clone_tree(path, SWE_ATTR_NOSUID | SWE_ATTR_NODEV, -1), target);
}

static void make_scratch(struct sandbox *box) {
    uint64_t size = box->setup->numbers[N_DISK];
    if (mkdir(SCRATCH, 0700)) fail(SCRATCH);
    attach(new_tmpfs(size, size / 4096 + 4096), SCRATCH);
    if (mkdir(SCRATCH "/upper", 0755) || mkdir(SCRATCH "/work", 0755)) fail(SCRATCH);
    give(box, SCRATCH "/upper");
    box->upper_fd = open(SCRATCH "/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (box->upper_fd < 0) fail("upper directory");
    box->scratch_fd = box->upper_fd;
    if (box->copy_from_fd >= 0) {
        if (copy_tree(box->copy_from_fd, box->upper_fd, box->id.real_root, box->id.real_root)) fail("copy of the upper directory");
        close(box->copy_from_fd);
    }
}

/* Layers are mounted at short names, so that the options of mount(2) (one page) hold 64 of them and no path is quoted. */
static void mount_workdir(struct sandbox *box, const int *layers) {
    const struct setup *setup = box->setup;
    const char *target = inside(setup->workdir);
    make_parents(target);
    if (mkdir(target, 0755) && errno != EEXIST) fail(target);
    if (setup->num_layers == 0) {
        attach(clone_tree(SCRATCH "/upper", SWE_ATTR_NOSUID | SWE_ATTR_NODEV, -1), target);
        return;
    }
    char options[4096], path[64];
    int len = snprintf(options, sizeof options, "upperdir=" SCRATCH "/upper,workdir=" SCRATCH "/work,%slowerdir=",
                       box->id.real_root ? "" : "userxattr,");
    for (size_t i = 0; i < setup->num_layers; i++) {
        snprintf(path, sizeof path, SCRATCH "/l%zu", i);
        if (mkdir(path, 0755)) fail(path);
        attach(layers[i], path);
        len += snprintf(options + len, sizeof options - (size_t)len, "%s%s", i ? ":" : "", path);
    }
    if (mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options)) fail("overlay");
}

static int open_layer(struct sandbox *box, size_t index, bool *unmapped) {
    uint64_t attributes = SWE_ATTR_RDONLY | SWE_ATTR_NOSUID | SWE_ATTR_NODEV;
    const char *path = box->setup->layers[index];
    int map = box->id.real_root ? box->id.layer_map_fd[index] : -1;
    int fd = clone_tree(path, attributes, map);
    if (fd < 0) fd = clone_tree(path, attributes, map = -1);
    *unmapped |= box->id.real_root && map < 0;
    return fd;
}

static void make_dev(const int *device) {
    char path[64];
    if (mkdir("dev", 0755)) fail("dev");
    for (size_t i = 0; i < NUM_DEVICES; i++) {
        snprintf(path, sizeof path, "dev/%s", devices[i]);
        attach_at_new(device[i], path);
    }
    static const char *const links[][2] = {
        {"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"},
        {"/proc/self/fd/2", "dev/stderr"}, {"pts/ptmx", "dev/ptmx"}};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1])) fail(links[i][1]);
    const char *const options[][2] = {{"ptmxmode", "0666"}, {"mode", "0620"}, {NULL, NULL}};
    attach_at_new(new_filesystem("devpts", options, SWE_ATTR_NOSUID | SWE_ATTR_NOEXEC), "dev/pts");
}

static void make_proc(struct sandbox *box) {
    attach_at_new(new_filesystem("proc", NULL, SWE_ATTR_NOSUID | SWE_ATTR_NODEV | SWE_ATTR_NOEXEC), "proc");
    box->proc = opendir("proc");
    box->sysctl_fd = open("proc/sys", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (!box->proc || box->sysctl_fd < 0) fail("/proc");
    /* Matters only where the command's user is root outside: such a user may write these without a capability. */
    static const char *const readonly[] = {"sys", "irq", "bus", "fs", "acpi", "scsi", "sysrq-trigger", "mtrr"};
    static const char *const hidden[] = {"kcore", "kmsg", "keys", "timer_list", "kallsyms", "key-users"};
    char path[64];
    for (size_t i = 0; i < sizeof readonly / sizeof *readonly; i++) {
        snprintf(path, sizeof path, "proc/%s", readonly[i]);
        if (access(path, F_OK)) continue;
        attach(clone_tree(path, SWE_ATTR_RDONLY | SWE_ATTR_NOSUID | SWE_ATTR_NODEV | SWE_ATTR_NOEXEC, -1), path);
    }
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        snprintf(path, sizeof path, "proc/%s", hidden[i]);
        if (access(path, F_OK)) continue;
        attach(clone_tree("dev/null", SWE_ATTR_RDONLY, -1), path);
    }
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return; /* a kernel without IPv4 has no loopback to raise */
    (void)ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
}

static void place_items(struct sandbox *box, const int *trees, const int *layers) {
    const struct setup *setup = box->setup;
    for (size_t i = 0; i < setup->num_items; i++) {
        const struct setup_item *item = &setup->items[i];
        const char *path = inside(item->tag == T_BIND || item->tag == T_LINK ? item->b : item->a);
        if (item->tag == T_BIND) attach_at_new(trees[i], path);
        if (item->tag == T_WORKDIR) mount_workdir(box, layers);
        if (item->tag == T_LINK) {
            make_parents(path);
            if (symlink(item->a, path) && errno != EEXIST) fail(path);
        }
        if (item->tag == T_FILE) {
            make_parents(path);
            int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
            if (fd < 0 || write(fd, item->b, item->len) != (ssize_t)item->len) fail(path);
            close(fd);
        }
    }
}

void build_root(struct sandbox *box) {
    const struct setup *setup = box->setup;
    int trees[MAX_ITEMS], layers[MAX_LAYERS], device[NUM_DEVICES];
    bool unmapped = false;
    char path[64];
    loopback_up();
    if (sethostname("sandbox", 7)) fail("host name");
    if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
    for (size_t i = 0; i < setup->num_items; i++)
        if (setup->items[i].tag == T_BIND)
            trees[i] = clone_tree(setup->items[i].a, SWE_ATTR_RDONLY | SWE_ATTR_NOSUID | SWE_ATTR_NODEV, -1);
    for (size_t i = 0; i < setup->num_layers; i++) layers[i] = open_layer(box, i, &unmapped);
    for (size_t i = 0; i < NUM_DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i]);
        device[i] = clone_tree(path, SWE_ATTR_NOSUID | SWE_ATTR_NOEXEC, -1);
    }
    int root = new_tmpfs(4u << 20, 4096);
    if (syscall(SYS_move_mount, root, "", AT_FDCWD, "/tmp", SWE_MOVE_EMPTY_FROM)) fail("new root");
    if (fchdir(root)) fail("new root");
    make_scratch(box);
    make_dev(device);
    make_proc(box);
    bind_scratch(box, "tmp", "tmp", 01777);
    bind_scratch(box, "shm", "dev/shm", 01777);
    bind_scratch(box, "home", "home/agent", 0755);
    place_items(box, trees, layers);
    if (unmapped && setup->num_layers) {
        int top = open(inside(setup->workdir), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (top < 0 || give_tree_to_command(top)) fail("ownership of the work directory");
        close(top);
    }
    if (umount2(SCRATCH, MNT_DETACH) || rmdir(SCRATCH)) fail("scratch");
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) fail("pivot_root");
    int top = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (top < 0 || sys_mount_setattr(top, 0, SWE_ATTR_RDONLY, 0)) fail("read-only root");
    close(top);
    close(root);
}
