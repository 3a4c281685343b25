/* Two nodes for the cases on tcp. With TWO_NODES_NET (scripts/two-nodes), half of the devices make their sockets in the network namespace of
 * the second node, so the connections of a case cross the link between the nodes. A socket stays in the namespace in which it was made, so
 * only dp_qp_export and dp_qp_connect, which make sockets, run there. The linker replaces both (--wrap). */
#include "nodes.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "dp_tcp.h"
#include "runner.h"

#undef dp_dev_open

enum { DEVICES = 64 };

static int first_fd = -1, second_fd = -1; /* the namespaces of both nodes */
static const char *addresses[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const dp_dev *devices[2][DEVICES]; /* the open ones of this process, by node */
static __thread bool on_second;           /* this thread's devices are on the second node */

bool nodes_open(char *why, size_t len) {
    const char *second = getenv("TWO_NODES_NET");
    if (!second || !t_is_tcp())
        return true;
    addresses[0] = getenv("TWO_NODES_FIRST");
    addresses[1] = getenv("TWO_NODES_SECOND");
    first_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    second_fd = open(second, O_RDONLY | O_CLOEXEC);
    if (addresses[0] && addresses[1] && first_fd >= 0 && second_fd >= 0)
        return true;
    snprintf(why, len, "the second node, TWO_NODES_NET=%.200s: %s", second, strerror(errno));
    return false;
}

bool nodes_two(void) { return second_fd >= 0; }

void nodes_peer(bool process) {
    if (process)
        memset(devices, 0, sizeof devices);
    on_second = true;
}

static int count(int node) {
    int n = 0;
    for (int i = 0; i < DEVICES; i++)
        n += devices[node][i] != NULL;
    return n;
}

/* Replaces one entry of a node. */
static bool replace(int node, const dp_dev *from, const dp_dev *to) {
    for (int i = 0; i < DEVICES; i++)
        if (devices[node][i] == from) {
            devices[node][i] = to;
            return true;
        }
    return false;
}

int nodes_dev_open(const dp_dev_options *o, dp_dev **out, dp_error *err) {
    dp_dev_options mine = *o;
    bool placed = (o->address && *o->address) || (o->advertise && *o->advertise) || o->handed;
    if (!nodes_two() || placed)
        return dp_dev_open("tcp", o, out, err);
    pthread_mutex_lock(&lock);
    int node = on_second || count(0) > count(1);
    mine.address = addresses[node];
    int st = dp_dev_open("tcp", &mine, out, err);
    if (st == DP_OK && !replace(node, NULL, *out))
        T_FAIL("more than %d devices on a node", DEVICES);
    pthread_mutex_unlock(&lock);
    return st;
}

/* Moves this thread to the node of a device. Returns whether the thread has to come back. */
static bool enter_node_of(const dp_dev *dev) {
    bool far = false;
    if (!nodes_two())
        return false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < DEVICES; i++)
        far |= devices[1][i] == dev;
    pthread_mutex_unlock(&lock);
    if (far && setns(second_fd, CLONE_NEWNET))
        T_FAIL("enter the second node: %s", strerror(errno));
    return far;
}

static void leave_node(bool entered) {
    if (entered && setns(first_fd, CLONE_NEWNET))
        T_FAIL("return to the first node: %s", strerror(errno));
}

void __real_dp_dev_close(dp_dev *dev);
void __wrap_dp_dev_close(dp_dev *dev);
void __wrap_dp_dev_close(dp_dev *dev) {
    pthread_mutex_lock(&lock);
    if (dev && !replace(0, dev, NULL))
        replace(1, dev, NULL);
    pthread_mutex_unlock(&lock);
    __real_dp_dev_close(dev);
}

int __real_dp_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err);
int __wrap_dp_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err);
int __wrap_dp_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err) {
    bool entered = enter_node_of(qp->domain->dev);
    int st = __real_dp_qp_export(qp, blob, len, err);
    leave_node(entered);
    return st;
}

int __real_dp_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err);
int __wrap_dp_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err);
int __wrap_dp_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err) {
    bool entered = enter_node_of(qp->domain->dev);
    int st = __real_dp_qp_connect(qp, blob, len, err);
    leave_node(entered);
    return st;
}

uint64_t nodes_received(void) {
    char line[256];
    unsigned long long bytes = 0;
    FILE *f = nodes_two() ? fopen("/proc/self/net/dev", "re") : NULL;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, " cable: %llu", &bytes) == 1)
            break;
    if (f)
        fclose(f);
    return bytes;
}

/* Twice the hello: besides it there are headers of TCP. Less comes without a connection, from the neighbour protocols. */
bool nodes_crossed(uint64_t since) { return nodes_received() - since >= 2 * DP_TCP_HELLO_SIZE; }
