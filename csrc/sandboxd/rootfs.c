/* The file system of a sandbox: a root of read-only binds, or an overlay of an image's layers; an overlay at the work
 * directory; one size-capped tmpfs for everything that can be written. All mounts live in the new mount namespace and
 * vanish with PID 1. */
#include <net/if.h>
#include <sys/ioctl.h>
#include "sandboxd.h"
#define SCRATCH ".scratch" /* only while building: detached at the end, so that no command sees upper or work */
#define LAYER_COPY_BYTES (4ull << 30)

/* "/a/b" -> "a/b": everything is built relative to the new root. */
static const char *inside(const char *path) {
    while (*path == '/') path++;
    return *path ? path : ".";
}
static void make_dir(const char *path) {
    if (mkdir(path, 0755) && errno != EEXIST && errno != EROFS) fail(path); /* EROFS: what is mounted there must do */
}

static void make_parents(const char *path) {
    char part[4096];
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof part) fail("path");
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = 0;
        make_dir(part);
    }
}

/* A detached, private copy of a mount, with attributes. */
static int clone_tree(const char *path, uint64_t attributes) {
    int fd = (int)syscall(NR_open_tree, AT_FDCWD, path, TREE_CLONE | TREE_CLOEXEC | RECURSIVE);
    if (fd < 0 || sys_mount_setattr(fd, RECURSIVE, attributes, 0)) fail(path);
    return fd;
}

static void attach(int tree, const char *target) {
    if (syscall(NR_move_mount, tree, "", AT_FDCWD, target, MOVE_EMPTY_FROM)) fail(target);
    close(tree);
}
static void attach_at_new(int tree, const char *target) {
    struct stat info;
    if (fstat(tree, &info)) fail(target);
    make_parents(target);
    if (S_ISDIR(info.st_mode)) make_dir(target);
    else if (mknod(target, S_IFREG | 0644, 0) && errno != EEXIST && errno != EROFS) fail(target);
    attach(tree, target);
}

/* Options: name, value, ..., NULL. */
static int new_filesystem(const char *type, const char *const *options, uint64_t attributes) {
    int context = (int)syscall(NR_fsopen, type, FS_CLOEXEC);
    if (context < 0) fail(type);
    for (; *options; options += 2)
        if (syscall(NR_fsconfig, context, FS_SET_STRING, options[0], options[1], 0)) fail(type);
    if (syscall(NR_fsconfig, context, FS_CREATE, NULL, NULL, 0)) fail(type);
    int fd = (int)syscall(NR_fsmount, context, FS_CLOEXEC, attributes);
    if (fd < 0) fail(type);
    close(context);
    return fd;
}

static int new_tmpfs(uint64_t size) {
    char bytes[32], inodes[32]; /* files cost memory too, even empty ones */
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)size);
    snprintf(inodes, sizeof inodes, "%llu", (unsigned long long)size / 4096 + 4096);
    const char *const options[] = {"size", bytes, "nr_inodes", inodes, "mode", "0755", NULL};
    return new_filesystem("tmpfs", options, ATTR_NOSUID | ATTR_NODEV);
}

static void bind_scratch(const struct sandbox *box, const char *name, const char *target, mode_t mode) {
    char path[64];
    snprintf(path, sizeof path, SCRATCH "/%s", name);
    if (mkdir(path, mode) || chmod(path, mode)) fail(path);
    if (box->real_root && chown(path, OUTSIDE_COMMAND, OUTSIDE_COMMAND)) fail(path);
    if (target) attach_at_new(clone_tree(path, ATTR_NOSUID | ATTR_NODEV), target);
}

/* A process of its own copies the upper directory of the sandbox that this one is forked from, beside the rest of the
 * start. Until `finish_copy` nothing may be mounted over the upper directory. */
static void start_copy(struct sandbox *box) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) || (box->copier = fork()) < 0) fail("copy of the upper directory");
    if (box->copier == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (copy_tree(box->copy_from_fd, box->upper_fd, box->real_root, box->real_root)) fail("copy of the upper directory");
        _exit(write(ends[1], "c", 1) != 1);
    }
    close(ends[1]);
    close(box->copy_from_fd); /* it would keep the memory of a sandbox that is closed */
    box->copy_from_fd = -1;
    box->copied_fd = ends[0];
}

static void finish_copy(struct sandbox *box) {
    char done;
    if (box->copied_fd < 0) return;
    if (read(box->copied_fd, &done, 1) != 1) _exit(1); /* it has told the owner why */
    while (waitpid(-1, NULL, 0) > 0) {} /* unless it is the launcher's child */
    close(box->copied_fd);
    box->copied_fd = -1;
}

void open_scratch(struct sandbox *box) {
    box->scratch_fd = new_tmpfs(box->setup->numbers[N_DISK]);
    if (mkdirat(box->scratch_fd, "upper", 0755)) fail("upper directory");
    box->upper_fd = openat(box->scratch_fd, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (box->upper_fd < 0 || (box->real_root && fchown(box->upper_fd, OUTSIDE_COMMAND, OUTSIDE_COMMAND)))
        fail("upper directory");
    if (box->copy_from_fd >= 0) start_copy(box);
}

static void make_scratch(struct sandbox *box) {
    if (mkdir(SCRATCH, 0700)) fail(SCRATCH);
    if (box->scratch_fd < 0) open_scratch(box);
    attach(box->scratch_fd, SCRATCH);
    if (mkdir(SCRATCH "/work", 0755) || mkdir(SCRATCH "/empty", 0755)) fail("scratch directories");
}

/* Places layer `i` at `path`, owned by the command's user: by an id-mapped mount, or else by a copy. */
static void place_layer(const struct sandbox *box, int tree, size_t i, const char *path) {
    int map = box->layer_map_fd[i];
    if (mkdir(path, 0755)) fail(path);
    if (!box->real_root || (map >= 0 && sys_mount_setattr(tree, 0, ATTR_IDMAP, (uint64_t)map) == 0)) {
        attach(tree, path);
        return;
    }
    attach(new_tmpfs(LAYER_COPY_BYTES), path); /* this file system cannot be id-mapped, overlayfs for one */
    int from = openat(tree, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), to = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0 || to < 0 || copy_tree(from, to, true, true)) fail(box->setup->layers[i]);
    close(from);
    close(to);
    close(tree);
}

/* Layers are mounted at short names, so that the options of mount(2), one page, hold 64 and no path is quoted. */
static void mount_workdir(struct sandbox *box, const int *layers) {
    const struct setup *setup = box->setup;
    const char *target = inside(setup->workdir);
    char options[4096], path[64];
    finish_copy(box);
    make_parents(target);
    if (mkdir(target, 0755) == 0 && box->real_root && chown(target, OUTSIDE_COMMAND, OUTSIDE_COMMAND)) fail(target);
    if (setup->num_layers == 0 && setup->image) return; /* a directory of the image */
    if (setup->num_layers == 0) {
        attach(clone_tree(SCRATCH "/upper", ATTR_NOSUID | ATTR_NODEV), target);
        return;
    }
    int len = snprintf(options, sizeof options, "upperdir=" SCRATCH "/upper,workdir=" SCRATCH "/work,%slowerdir=",
                       box->real_root ? "" : "userxattr,");
    for (size_t i = 0; i < setup->num_layers; i++) {
        snprintf(path, sizeof path, SCRATCH "/l%zu", i);
        place_layer(box, layers[i], i, path);
        len += snprintf(options + len, sizeof options - (size_t)len, "%s%s", i ? ":" : "", path);
    }
    if (mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options)) fail("overlay");
}

/* An overlay of the image's layers becomes the current directory, and the root while things are placed in it: no link
 * of an image leads out. Names of layers are short and relative, so that the one page of options that mount(2) takes
 * holds 128. What fork() copies is this overlay's upper directory, unless the work directory has layers of its own. */
static void enter_image(struct sandbox *box, int tree) {
    bool own = box->setup->num_layers > 0;
    char options[4096];
    if (own) bind_scratch(box, "top", NULL, 0755);
    int scratch = (int)syscall(NR_open_tree, AT_FDCWD, SCRATCH, TREE_CLONE | TREE_CLOEXEC);
    if (scratch < 0 || chdir(SCRATCH) || mkdir("topwork", 0755) || mkdir("i", 0755) || mkdir("image", 0755))
        fail("scratch directories");
    attach(tree, "i");
    if (!own) finish_copy(box);
    int len = snprintf(options, sizeof options, "%supperdir=%s,workdir=%s,lowerdir=i/", box->real_root ? "" : "userxattr,",
                       own ? "top" : "upper", own ? "topwork" : "work");
    for (const char *at = box->setup->image_layers; *at && len < (int)sizeof options - 4; at++) {
        options[len++] = *at;
        if (*at == ':') options[len++] = 'i', options[len++] = '/';
    }
    options[len] = 0;
    if (mount("overlay", "image", "overlay", MS_NOSUID | MS_NODEV, options)) fail("overlay of the image");
    if (chdir("image") || chroot(".") || mkdir(SCRATCH, 0700)) fail("image");
    attach(scratch, SCRATCH);
    bind_scratch(box, "dev", "dev", 0755);
}

static void make_proc(struct sandbox *box) {
    const char *const none[] = {NULL};
    attach_at_new(new_filesystem("proc", none, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC), "proc");
    box->proc = opendir("proc");
    box->sysctl_fd = open("proc/sys", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (!box->proc || box->sysctl_fd < 0) fail("proc");
    /* Matters only where the command's user is root outside: such a user may write these without a capability. */
    static const char *const readonly[] = {"proc/sys", "proc/irq",  "proc/bus",           "proc/fs",
                                           "proc/acpi", "proc/scsi", "proc/sysrq-trigger", "proc/mtrr"};
    for (size_t i = 0; i < sizeof readonly / sizeof *readonly; i++)
        if (access(readonly[i], F_OK) == 0)
            attach(clone_tree(readonly[i], ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC), readonly[i]);
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return; /* a kernel without IPv4 has no loopback to raise */
    (void)ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
}

static void place_item(struct sandbox *box, const struct setup_item *item, int tree, const int *layers) {
    const char *path = inside(item->a);
    if (item->op == OP_BIND || item->op == OP_DEVICE) attach_at_new(tree, path);
    if (item->op == OP_EMPTY)
        attach_at_new(clone_tree(SCRATCH "/empty", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV), path);
    if (item->op == OP_WORKDIR) mount_workdir(box, layers);
    if (item->op == OP_LINK) {
        make_parents(path);
        if (symlink(item->b, path) && errno != EEXIST) fail(path);
    }
    if (item->op == OP_FILE) {
        make_parents(path);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
        if (fd < 0 || write(fd, item->b, item->len) != (ssize_t)item->len) fail(path);
        close(fd);
    }
}

void build_root(struct sandbox *box) {
    static int trees[MAX_ITEMS], layers[MAX_LAYERS];
    static const char *const terminals[] = {"ptmxmode", "0666", "mode", "0620", NULL};
    const struct setup *setup = box->setup;
    int image = -1, host = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    loopback_up();
    if (sethostname("sandbox", 7)) fail("host name");
    if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
    /* All of the host is taken before anything of it is covered. */
    for (size_t i = 0; i < setup->num_items; i++) {
        const struct setup_item *item = &setup->items[i];
        if (item->op == OP_BIND) trees[i] = clone_tree(item->b, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
        if (item->op == OP_DEVICE) trees[i] = clone_tree(item->b, ATTR_NOSUID | ATTR_NOEXEC);
    }
    for (size_t i = 0; i < setup->num_layers; i++)
        layers[i] = clone_tree(setup->layers[i], ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    if (setup->image) image = clone_tree(setup->image, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    int root = new_tmpfs(4u << 20);
    if (syscall(NR_move_mount, root, "", AT_FDCWD, "/tmp", MOVE_EMPTY_FROM) || fchdir(root)) fail("new root");
    make_scratch(box);
    if (setup->image) enter_image(box, image);
    make_proc(box);
    attach_at_new(new_filesystem("devpts", terminals, ATTR_NOSUID | ATTR_NOEXEC), "dev/pts");
    bind_scratch(box, "shm", "dev/shm", 01777);
    if (!setup->image) bind_scratch(box, "tmp", "tmp", 01777);
    if (!setup->image) bind_scratch(box, "home", "home/agent", 0755);
    for (size_t i = 0; i < setup->num_items; i++) place_item(box, &setup->items[i], trees[i], layers);
    if (umount2(SCRATCH, MNT_DETACH) || rmdir(SCRATCH)) fail("scratch");
    int top = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fchdir(host) || chroot(".") || fchdir(top)) fail("old root");
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) fail("pivot_root");
    if (!setup->image && sys_mount_setattr(root, 0, ATTR_RDONLY, 0)) fail("read-only root");
    close(root);
    close(top);
    close(host);
}
