/* Two processes of different users share memory. The blob's token gives access, not the user id. */
#include <unistd.h>

#include "ends.h"

static void other_user(int sock, void *arg) {
    (void)arg;
    end e;
    card mine, theirs;
    CHECK_EQ(setgid(65534), 0);
    CHECK_EQ(setuid(65534), 0);
    static const end_opts o = {.size = 4096};
    end_open(&e, &o, NULL);
    end_card(&e, &mine);
    t_send(sock, &mine, sizeof mine);
    t_recv(sock, &theirs, sizeof theirs);
    end_connect(&e, &theirs);
    t_sync(sock);
    end_imm(&e);
    CHECK_PATTERN(end_bytes(&e), 300, 7);
    fill_pattern(local_bytes(&e), 300, 8);
    dp_sge sge = local_sge(&e, 0, 300);
    end_write_imm(&e, &sge, 1, theirs.regions[0].addr, theirs.regions[0].rkey, 1, 1, 0);
    t_sync(sock);
    end_close(&e);
}

T_CASE(users, "connect/other-user", .providers = T_SHM) {
    if (getuid() != 0)
        t_skip("only root can become another user");
    t_peer p;
    end e;
    card mine, theirs;
    static const end_opts o = {.size = 4096};
    t_peer_start(&p, true, other_user, NULL);
    end_open(&e, &o, NULL);
    end_card(&e, &mine);
    t_recv(p.sock, &theirs, sizeof theirs);
    t_send(p.sock, &mine, sizeof mine);
    end_connect(&e, &theirs);
    t_sync(p.sock);
    fill_pattern(local_bytes(&e), 300, 7);
    dp_sge sge = local_sge(&e, 0, 300);
    end_write_imm(&e, &sge, 1, theirs.regions[0].addr, theirs.regions[0].rkey, 1, 1, 0);
    end_imm(&e);
    CHECK_PATTERN(end_bytes(&e), 300, 8);
    t_sync(p.sock);
    t_peer_join(&p);
    end_close(&e);
}
