#include <pthread.h>
#include <stdlib.h>

#include "example.h"

struct quiet {
    MPI_Comm node, firsts;
    MPI_Win window;
    pthread_barrier_t *barrier;
    int rank, nodes;
};

quiet *quiet_create(MPI_Comm comm) {
    quiet *q = calloc(1, sizeof *q);
    if (!q)
        return NULL;
    int size, unit;
    MPI_Aint bytes;
    MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &q->node);
    MPI_Comm_rank(q->node, &q->rank);
    MPI_Comm_size(q->node, &size);
    MPI_Comm_split(comm, q->rank == 0 ? 0 : MPI_UNDEFINED, 0, &q->firsts);
    q->nodes = 1;
    if (q->firsts != MPI_COMM_NULL)
        MPI_Comm_size(q->firsts, &q->nodes);
    MPI_Win_allocate_shared(q->rank == 0 ? (MPI_Aint)sizeof *q->barrier : 0, 1, MPI_INFO_NULL, q->node, &q->barrier,
                            &q->window);
    MPI_Win_shared_query(q->window, 0, &bytes, &unit, &q->barrier);
    if (q->rank == 0) {
        pthread_barrierattr_t attr;
        pthread_barrierattr_init(&attr);
        pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(q->barrier, &attr, (unsigned)size);
        pthread_barrierattr_destroy(&attr);
    }
    MPI_Barrier(q->node);
    return q;
}

void quiet_barrier(quiet *q) {
    pthread_barrier_wait(q->barrier);
    if (q->nodes > 1 && q->rank == 0)
        MPI_Barrier(q->firsts);
    pthread_barrier_wait(q->barrier);
}

void quiet_free(quiet *q) {
    MPI_Barrier(q->node);
    if (q->rank == 0)
        pthread_barrier_destroy(q->barrier);
    MPI_Win_free(&q->window);
    if (q->firsts != MPI_COMM_NULL)
        MPI_Comm_free(&q->firsts);
    MPI_Comm_free(&q->node);
    free(q);
}
