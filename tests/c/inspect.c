/* The reader of ELF files, and the process that it runs in. Libraries that tests compile are read in internal/zygote. */
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/message.h"
#include "worker/sandbox.h"
#include "harness.h"

/* A library that exports f and needs one version of libc.so.6. */
typedef struct tiny {
    Elf64_Ehdr head;
    Elf64_Sym symbols[2];
    Elf64_Verneed need;
    Elf64_Vernaux version;
    char strings[64];
    Elf64_Shdr sections[4];
} tiny;

static tiny tiny_library(const char *version) {
    tiny t;
    memset(&t, 0, sizeof t);
    memcpy(t.head.e_ident, ELFMAG "\2\1\1", SELFMAG + 3);
    t.head.e_type = ET_DYN;
    t.head.e_machine = DP_ELF_MACHINE;
    t.head.e_shoff = offsetof(tiny, sections);
    t.head.e_shentsize = sizeof(Elf64_Shdr);
    t.head.e_shnum = 4;
    memcpy(t.strings + 1, "f\0libc.so.6", 12);
    snprintf(t.strings + 13, sizeof t.strings - 13, "%s", version);
    t.symbols[1] = (Elf64_Sym){.st_name = 1, .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC), .st_shndx = 1, .st_value = 0x1000, .st_size = 16};
    t.need = (Elf64_Verneed){.vn_version = 1, .vn_cnt = 1, .vn_file = 3, .vn_aux = sizeof t.need};
    t.version = (Elf64_Vernaux){.vna_name = 13};
    t.sections[1] = (Elf64_Shdr){.sh_type = SHT_DYNSYM, .sh_link = 2, .sh_offset = offsetof(tiny, symbols), .sh_size = sizeof t.symbols};
    t.sections[2] = (Elf64_Shdr){.sh_type = SHT_STRTAB, .sh_offset = offsetof(tiny, strings), .sh_size = sizeof t.strings};
    t.sections[3] = (Elf64_Shdr){.sh_type = SHT_GNU_verneed, .sh_link = 2, .sh_offset = offsetof(tiny, need),
                                 .sh_size = sizeof t.need + sizeof t.version};
    return t;
}

static int inspect(const tiny *t, const char *glibc, dp_error *err) {
    dp_elf_work *work = calloc(1, sizeof *work);
    char *out = malloc(DP_ELF_NAMES_MAX);
    CHECK(work && out);
    uint32_t count = 0, bytes = 0;
    int st = dp_elf_functions(t, sizeof *t, glibc, work, out, &count, &bytes, err);
    if (st == DP_OK) {
        CHECK_EQ(count, 1u);
        CHECK_EQ(bytes, 2u);
        CHECK_SAME(out, "f", 2);
    }
    free(work);
    free(out);
    return st;
}

/* A library that needs a newer C library than the node has is refused, and no other. */
T_CASE(glibc, "inspect/glibc") {
    static const struct {
        const char *needs, *node, *refusal;
    } cases[] = {
        {"GLIBC_2.17", "2.36", NULL},
        {"GLIBC_2.36", "2.36", NULL},
        {"GLIBC_2.2.5", "2.2", NULL}, /* counts as 2.2 */
        {"GLIBC_2.37", "2.36",
         "needs GLIBC_2.37 of \"libc.so.6\", but this node has glibc 2.36: build it on a system that is as old as the node"},
        {"GLIBC_2.9", "2.10", NULL}, /* numbers, not text */
        {"GLIBC_2.10", "2.9", "needs GLIBC_2.10 of"},
        {"GLIBC_3.0", "2.36", "needs GLIBC_3.0 of"},
        {"GLIBC_2.36", "3.0", NULL},
        {"GLIBC_3", "2.36", NULL}, /* these are not versions */
        {"GLIBC_3.", "2.36", NULL},
        {"GLIBC_3.x", "2.36", NULL},
        {"GLIBC_PRIVATE", "2.36", NULL},
        {"GLIBC_ABI_DT_RELR", "2.36", NULL},
        {"GLIBCXX_9.4", "2.36", NULL},
        {"", "2.36", NULL},
        {"GLIBC_9.9", NULL, NULL}, /* the node's version is unknown */
        {"GLIBC_9.9", "musl", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tiny t = tiny_library(cases[i].needs);
        dp_error err = {0};
        int st = inspect(&t, cases[i].node, &err);
        if (!cases[i].refusal) {
            CHECKF(st == DP_OK, "%s on glibc %s: %s", cases[i].needs, cases[i].node ? cases[i].node : "?", err.msg);
            continue;
        }
        CHECKF(st == DP_BAD_LIBRARY && !strncmp(err.msg, cases[i].refusal, strlen(cases[i].refusal)), "%s on glibc %s: %d, \"%s\"",
               cases[i].needs, cases[i].node, st, err.msg);
    }
}

/* A file that is truncated anywhere is refused, and nothing beyond its end is read (with the address sanitizer). */
T_CASE(cut, "inspect/cut") {
    tiny whole = tiny_library("GLIBC_2.17");
    for (size_t size = 0; size < sizeof whole; size++) {
        uint8_t *file = malloc(size + 1);
        memcpy(file, &whole, size);
        dp_elf_work *work = calloc(1, sizeof *work);
        char *out = malloc(DP_ELF_NAMES_MAX);
        uint32_t count, bytes;
        dp_error err = {0};
        CHECK_STATUS(dp_elf_functions(file, size, "2.36", work, out, &count, &bytes, &err), DP_BAD_LIBRARY);
        CHECK(err.msg[0]);
        uint64_t offset = 0x1001;
        CHECK_EQ(dp_elf_symbols(file, size, &offset, 1, out), 1u);
        free(file);
        free(work);
        free(out);
    }
    uint64_t offsets[] = {0x1001, 0xfff, 0x1010};
    char out[3 * DP_ELF_LINE_MAX];
    static const char want[] = "f+0x1\n\n\n";
    CHECK_EQ(dp_elf_symbols(&whole, sizeof whole, offsets, 3, out), sizeof want - 1);
    CHECK_SAME(out, want, sizeof want - 1);
}

static int end_of(void (*act)(int sock), int sock) {
    pid_t child = fork();
    if (child == 0) {
        if (dp_sandbox_filter_reader())
            _exit(99);
        act(sock);
        _exit(7);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void answers(int sock) { dp_msg_send(sock, DP_MSG_INSPECTED, 3, "12345678", 8, -1); }
static void opens(int sock) {
    (void)sock;
    syscall(SYS_openat, -100, "/etc/passwd", 0);
}
static void writes(int sock) { syscall(SYS_write, sock, "x", 1); }
static void sends_elsewhere(int sock) { syscall(SYS_sendto, sock, "x", 1, 0, "\1\0/tmp/x", 9); }
static void maps(int sock) {
    (void)sock;
    syscall(SYS_mmap, NULL, 4096, 7, 0x22, -1, 0);
}
static void signals_others(int sock) {
    (void)sock;
    syscall(SYS_kill, 1, 0);
}

/* The process that reads a library can send its answer and exit. Any other system call ends it. */
T_CASE(sealed, "inspect/sealed") {
    if (T_ASAN || T_TSAN)
        t_skip("a sanitizer makes system calls of its own");
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK_EQ(end_of(answers, pair[0]), 7);
    dp_msg_head head;
    CHECK_EQ(recv(pair[1], &head, sizeof head, MSG_DONTWAIT), (ssize_t)sizeof head);
    CHECK_EQ(head.type, DP_MSG_INSPECTED);
    void (*const refused[])(int) = {opens, writes, sends_elsewhere, maps, signals_others};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        CHECK_EQ(end_of(refused[i], pair[0]), -SIGSYS);
    close(pair[0]);
    close(pair[1]);
}
