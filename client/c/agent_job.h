/* The batch job of a process, as a part of the name of its agent's socket. The library and the agent's commands must find the same
 * socket, so both include this header: the library in C, and the commands through cgo (internal/agent/protocol). */
#ifndef RFAAS_AGENT_JOB_H
#define RFAAS_AGENT_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define RFAAS_AGENT_JOB 48    /* bytes of a job's text, with its NUL */
#define RFAAS_AGENT_JOB_ID 32 /* of these, the largest number for the scheduler's identifier */

/* Environment variables of a batch system. Names other than `id` may be NULL. */
typedef struct rfaas_agent_batch {
    const char *id;    /* the identifier of the job */
    const char *index; /* the number of an element of an array whose elements have the same identifier */
    const char *mark;  /* a variable that must be set too, because other programs may also set `id` */
} rfaas_agent_batch;

/* The first batch system whose variables are set names the job. Flux is first because it also runs inside jobs of the others. */
static const rfaas_agent_batch rfaas_agent_batches[] = {
    {"FLUX_JOB_ID", NULL, NULL},
    {"SLURM_JOB_ID", NULL, NULL},
    {"PBS_JOBID", NULL, NULL}, /* also Torque */
    {"LSB_JOBID", "LSB_JOBINDEX", NULL},
    {"JOB_ID", "SGE_TASK_ID", "SGE_ROOT"}, /* Grid Engine */
};

#define RFAAS_AGENT_BATCHES (sizeof rfaas_agent_batches / sizeof *rfaas_agent_batches)

/* Appends at most `most` bytes of a value. Bytes other than ASCII letters and digits become '_', so the text contains no '/' and no '.'. */
static inline void rfaas_agent_job_append(char job[RFAAS_AGENT_JOB], const char *value, size_t most) {
    size_t n = strlen(job);
    for (size_t i = 0; value[i] && i < most && n + 1 < RFAAS_AGENT_JOB; i++) {
        char c = value[i];
        bool keep = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
        job[n++] = keep ? c : '_';
    }
    job[n] = 0;
}

/* Sets the job's text from the values of one batch system's variables, which are NULL if they are not set. Returns false, and sets the
 * empty text, if they name no job. */
static inline bool rfaas_agent_job_of(const rfaas_agent_batch *batch, const char *id, const char *index, const char *mark,
                                      char job[RFAAS_AGENT_JOB]) {
    job[0] = 0;
    if (!id || !*id || (batch->mark && (!mark || !*mark)))
        return false;
    rfaas_agent_job_append(job, id, RFAAS_AGENT_JOB_ID);
    if (index && *index && strcmp(index, "0") && strcmp(index, "undefined")) { /* LSF's and Grid Engine's words for no array */
        rfaas_agent_job_append(job, "_", 1);
        rfaas_agent_job_append(job, index, RFAAS_AGENT_JOB);
    }
    return true;
}

#endif
