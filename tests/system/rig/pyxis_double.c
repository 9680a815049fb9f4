/* A double of pyxis, for tests: takes its options, and starts the task in a root file system of its own that shows what
 * an image would bring (PYXIS_DOUBLE_IMAGE_PATHS) and what --container-mounts names, and nothing else. What the image has
 * set (PYXIS_DOUBLE_IMAGE_ENV, words of NAME=VALUE) wins over the job's, but for names in --container-env. Fails in pyxis's words. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>
SPANK_PLUGIN(pyxis, 1)

static char *image, *mounts, *workdir, *kept, root[] = "/tmp/pyxis-double-root";
static int set_image(int v, const char *arg, int remote) { image = strdup(arg); return 0; }
static int set_mounts(int v, const char *arg, int remote) { mounts = strdup(arg); return 0; }
static int set_workdir(int v, const char *arg, int remote) { workdir = strdup(arg); return 0; }
static int set_kept(int v, const char *arg, int remote) { kept = strdup(arg); return 0; }
static int set_nothing(int v, const char *arg, int remote) { return 0; }
static struct spank_option options[] = {
    {"container-image", "X", "[pyxis double] image", 1, 0, set_image},
    {"container-mounts", "A:B[:flags],...", "[pyxis double] mounts", 1, 0, set_mounts},
    {"container-workdir", "PATH", "[pyxis double] working directory", 1, 0, set_workdir},
    {"container-env", "NAME,...", "[pyxis double] environment that wins over the image's", 1, 0, set_kept},
    {"container-mount-home", NULL, "[pyxis double]", 0, 0, set_nothing},
    {"no-container-mount-home", NULL, "[pyxis double]", 0, 0, set_nothing},
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t sp, int ac, char **av) {
    spank_context_t context = spank_context();
    if (context != S_CTX_LOCAL && context != S_CTX_REMOTE && context != S_CTX_ALLOCATOR) return 0;
    for (int i = 0; options[i].name; i++) if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS) return -1;
    return 0;
}

static void make_parents(char *path) {
    for (char *p = path + 1; *p; p++) if (*p == '/') { *p = 0; mkdir(path, 0755); *p = '/'; }
}

static int bind(const char *source, const char *target) {
    struct stat info;
    char full[4096];
    if (stat(source, &info)) { slurm_error("pyxis: [ERROR] source path does not exist: %s", source); return -1; }
    snprintf(full, sizeof full, "%s%s", root, target);
    make_parents(full);
    if (S_ISDIR(info.st_mode)) mkdir(full, 0755); else fclose(fopen(full, "a"));
    if (mount(source, full, NULL, MS_BIND | MS_REC, NULL)) { slurm_error("pyxis: mount %s: %s", source, strerror(errno)); return -1; }
    return 0;
}

/* Whether name is in the list, and the job has a value for it. */
static int keeps(spank_t sp, const char *name) {
    char list[8192] = "", value[8], *save = NULL;
    if (kept) snprintf(list, sizeof list, "%s", kept);
    for (char *p = strtok_r(list, ",", &save); p; p = strtok_r(NULL, ",", &save))
        if (!strcmp(p, name)) return spank_getenv(sp, name, value, sizeof value) != ESPANK_ENV_NOEXIST;
    return 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av) {
    char paths[4096] = "/bin:/lib:/lib64:/usr:/etc:/proc:/sys:/dev:/tmp", more[4096] = "", *save = NULL;
    if (!image) return 0;
    if (image[0] != '/' && image[0] != '.') { slurm_error("pyxis: the double has no registry"); return -1; }
    if (access(image, R_OK)) { slurm_error("pyxis: [ERROR] No such file or directory: %s", image); return -1; }
    /* Only what belongs to an image: test folders below /tmp must come by a mount. */
    *strstr(paths, ":/tmp") = 0;
    spank_getenv(sp, "PYXIS_DOUBLE_IMAGE_PATHS", more, sizeof more);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_PRIVATE | MS_REC, NULL)) return -1;
    mkdir(root, 0755);
    if (mount("tmpfs", root, "tmpfs", 0, NULL)) return -1;
    char scratch[4096];
    snprintf(scratch, sizeof scratch, "%s/tmp", root);
    mkdir(scratch, 01777);
    for (char *p = strtok_r(paths, ":", &save); p; p = strtok_r(NULL, ":", &save)) if (!access(p, F_OK) && bind(p, p)) return -1;
    for (char *p = strtok_r(more, ":", &save); p; p = strtok_r(NULL, ":", &save)) if (bind(p, p)) return -1;
    for (char *p = strtok_r(mounts, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        char *target = strchr(p, ':'), *flags = NULL;
        if (target) { *target++ = 0; if ((flags = strchr(target, ':'))) *flags = 0; }
        if (bind(p, target && *target ? target : p)) return -1;
    }
    if (chroot(root) || chdir(workdir ? workdir : "/")) { slurm_error("pyxis: couldn't chdir to %s", workdir); return -1; }
    char set[4096] = "", *value;
    spank_getenv(sp, "PYXIS_DOUBLE_IMAGE_ENV", set, sizeof set);
    for (char *p = strtok_r(set, " ", &save); p; p = strtok_r(NULL, " ", &save)) {
        if (!(value = strchr(p, '='))) continue;
        *value++ = 0;
        if (!keeps(sp, p)) spank_setenv(sp, p, value, 1);
    }
    /* What pyxis and enroot's hook for PyTorch images leave behind: srun's numbers, wrong for a launcher. */
    spank_setenv(sp, "RANK", "0", 1);
    spank_setenv(sp, "LOCAL_RANK", "0", 1);
    spank_setenv(sp, "WORLD_SIZE", "2", 1);
    spank_setenv(sp, "MASTER_PORT", "61000", 1);
    return 0;
}
