/* Copy of an overlay upper directory (fork), and giving a tree to the command's user.
 *
 * The source was written by untrusted commands and may change meanwhile: every step is relative to an open
 * directory and follows no link. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "sandboxd.h"

#define DEPTH_MAX 512 /* each level holds two descriptors and one directory stream */

struct copy {
    const char *opaque; /* the mark of a directory that hides the one below; its name depends on who mounted */
    bool give;
};

static bool is_dot(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

static int copy_bytes(int from, int to) {
    for (;;) {
        ssize_t done = sendfile(to, from, NULL, 1u << 20);
        if (done == 0) return 0;
        if (done < 0 && errno != EINTR) return -1;
    }
}

static int copy_file(int from, int to, const char *name, const struct stat *info, bool give) {
    int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (in < 0) return errno == ENOENT ? 0 : -1;
    int out = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int bad = out < 0 || copy_bytes(in, out) || (give && fchown(out, OUTSIDE_COMMAND, OUTSIDE_COMMAND)) ||
              fchmod(out, info->st_mode & 01777);
    const struct timespec times[2] = {info->st_atim, info->st_mtim};
    if (!bad) bad = futimens(out, times);
    close(in);
    if (out >= 0) close(out);
    return bad ? -1 : 0;
}

static int copy_dir(int from, int to, const struct copy *how, int depth);

static int copy_subdir(int from, int to, const char *name, const struct stat *info, const struct copy *how, int depth) {
    char value[8];
    if (mkdirat(to, name, 0700)) return -1;
    int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int out = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int bad = in < 0 || out < 0 || copy_dir(in, out, how, depth + 1);
    if (!bad && fgetxattr(in, how->opaque, value, sizeof value) == 1 && value[0] == 'y')
        bad = fsetxattr(out, how->opaque, value, 1, 0);
    if (!bad && how->give) bad = fchown(out, OUTSIDE_COMMAND, OUTSIDE_COMMAND);
    const struct timespec times[2] = {info->st_atim, info->st_mtim};
    if (!bad) bad = fchmod(out, info->st_mode & 01777) || futimens(out, times);
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    return bad ? -1 : 0;
}

static int copy_entry(int from, int to, const char *name, const struct copy *how, int depth) {
    struct stat info;
    char text[4096];
    if (fstatat(from, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : -1;
    if (S_ISDIR(info.st_mode)) return copy_subdir(from, to, name, &info, how, depth);
    if (S_ISREG(info.st_mode)) return copy_file(from, to, name, &info, how->give);
    if (S_ISCHR(info.st_mode) && info.st_rdev == 0) return mknodat(to, name, S_IFCHR, 0); /* whiteout: deleted below */
    if (S_ISFIFO(info.st_mode) && mknodat(to, name, S_IFIFO | (info.st_mode & 0777), 0)) return -1;
    if (S_ISLNK(info.st_mode)) {
        ssize_t len = readlinkat(from, name, text, sizeof text - 1);
        if (len < 0) return -1;
        text[len] = 0;
        if (symlinkat(text, to, name)) return -1;
    }
    if (S_ISSOCK(info.st_mode)) return 0; /* its process is not copied either */
    return how->give ? fchownat(to, name, OUTSIDE_COMMAND, OUTSIDE_COMMAND, AT_SYMLINK_NOFOLLOW) : 0;
}

static DIR *open_stream(int dir) {
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* own offset, and closedir may close it */
    return fd < 0 ? NULL : fdopendir(fd);
}

static int copy_dir(int from, int to, const struct copy *how, int depth) {
    if (depth > DEPTH_MAX) {
        errno = ELOOP;
        return -1;
    }
    DIR *stream = open_stream(from);
    if (!stream) return -1;
    int bad = 0;
    for (struct dirent *entry; !bad && (entry = readdir(stream));)
        if (!is_dot(entry->d_name)) bad = copy_entry(from, to, entry->d_name, how, depth);
    closedir(stream);
    return bad;
}

int copy_tree(int from, int to, bool trusted_xattr, bool give_to_command) {
    struct copy how = {trusted_xattr ? "trusted.overlay.opaque" : "user.overlay.opaque", give_to_command};
    struct stat info;
    if (fstat(from, &info) || fchmod(to, info.st_mode & 01777)) return -1;
    return copy_dir(from, to, &how, 0);
}

static int give_dir(int dir, int depth) {
    if (fchown(dir, OUTSIDE_COMMAND, OUTSIDE_COMMAND)) return -1;
    DIR *stream = depth > DEPTH_MAX ? NULL : open_stream(dir);
    if (!stream) return -1;
    int bad = 0;
    for (struct dirent *entry; !bad && (entry = readdir(stream));) {
        if (is_dot(entry->d_name)) continue;
        int sub = openat(dir, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        bad = sub >= 0 ? give_dir(sub, depth + 1)
                       : fchownat(dir, entry->d_name, OUTSIDE_COMMAND, OUTSIDE_COMMAND, AT_SYMLINK_NOFOLLOW);
        if (sub >= 0) close(sub);
    }
    closedir(stream);
    return bad;
}

int give_tree_to_command(int dir) { return give_dir(dir, 0); }
