/* generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit. */
/* rfaas_fields.h: the fields of the API's structures, by the names that they have in Python. */
#ifndef RFAAS_FIELDS_H
#define RFAAS_FIELDS_H

#include "binding.h"

__attribute__((unused)) static const binding_field rfaas_session_options_fields[] = {
    { "port", FIELD_INT32, offsetof(rfaas_session_options, port), sizeof(((rfaas_session_options *)0)->port) },
    { "manager", FIELD_STRING, offsetof(rfaas_session_options, manager), sizeof(((rfaas_session_options *)0)->manager) },
    { "executor", FIELD_STRING, offsetof(rfaas_session_options, executor), sizeof(((rfaas_session_options *)0)->executor) },
    { "provider", FIELD_STRING, offsetof(rfaas_session_options, provider), sizeof(((rfaas_session_options *)0)->provider) },
    { "tenant", FIELD_STRING, offsetof(rfaas_session_options, tenant), sizeof(((rfaas_session_options *)0)->tenant) },
    { "device", FIELD_STRING, offsetof(rfaas_session_options, device), sizeof(((rfaas_session_options *)0)->device) },
    { "gid_index", FIELD_INT32, offsetof(rfaas_session_options, gid_index), sizeof(((rfaas_session_options *)0)->gid_index) },
    { "pkey_index", FIELD_INT32, offsetof(rfaas_session_options, pkey_index), sizeof(((rfaas_session_options *)0)->pkey_index) },
    { "traffic_class", FIELD_INT32, offsetof(rfaas_session_options, traffic_class), sizeof(((rfaas_session_options *)0)->traffic_class) },
    { "service_level", FIELD_INT32, offsetof(rfaas_session_options, service_level), sizeof(((rfaas_session_options *)0)->service_level) },
    { "mtu", FIELD_INT32, offsetof(rfaas_session_options, mtu), sizeof(((rfaas_session_options *)0)->mtu) },
    { "timeout", FIELD_SECONDS, offsetof(rfaas_session_options, timeout_ns), sizeof(((rfaas_session_options *)0)->timeout_ns) },
    { "cached_leases", FIELD_INT32, offsetof(rfaas_session_options, cached_leases), sizeof(((rfaas_session_options *)0)->cached_leases) },
    { "data_encryption", FIELD_UINT32, offsetof(rfaas_session_options, data_encryption), sizeof(((rfaas_session_options *)0)->data_encryption) },
    { "secret_file", FIELD_STRING, offsetof(rfaas_session_options, secret_file), sizeof(((rfaas_session_options *)0)->secret_file) },
    { "token_file", FIELD_STRING, offsetof(rfaas_session_options, token_file), sizeof(((rfaas_session_options *)0)->token_file) },
    { 0 },
};

__attribute__((unused)) static const binding_flag rfaas_session_options_flags[] = {
    { "allow_plaintext", RFAAS_SESSION_ALLOW_PLAINTEXT },
    { "local", RFAAS_SESSION_LOCAL },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_change_fields[] = {
    { "state", FIELD_UINT32, offsetof(rfaas_change, state), sizeof(((rfaas_change *)0)->state) },
    { "executor", FIELD_TEXT, offsetof(rfaas_change, executor), sizeof(((rfaas_change *)0)->executor) },
    { "node", FIELD_TEXT, offsetof(rfaas_change, node), sizeof(((rfaas_change *)0)->node) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_lease_options_fields[] = {
    { "workers", FIELD_UINT32, offsetof(rfaas_lease_options, workers), sizeof(((rfaas_lease_options *)0)->workers) },
    { "cores_per_worker", FIELD_UINT32, offsetof(rfaas_lease_options, cores_per_worker), sizeof(((rfaas_lease_options *)0)->cores_per_worker) },
    { "depth", FIELD_UINT32, offsetof(rfaas_lease_options, depth), sizeof(((rfaas_lease_options *)0)->depth) },
    { "eager", FIELD_UINT32, offsetof(rfaas_lease_options, eager), sizeof(((rfaas_lease_options *)0)->eager) },
    { "wait_mode", FIELD_UINT32, offsetof(rfaas_lease_options, wait_mode), sizeof(((rfaas_lease_options *)0)->wait_mode) },
    { "bulk", FIELD_UINT64, offsetof(rfaas_lease_options, bulk), sizeof(((rfaas_lease_options *)0)->bulk) },
    { "memory", FIELD_UINT64, offsetof(rfaas_lease_options, memory), sizeof(((rfaas_lease_options *)0)->memory) },
    { "duration", FIELD_SECONDS, offsetof(rfaas_lease_options, duration_ns), sizeof(((rfaas_lease_options *)0)->duration_ns) },
    { "library", FIELD_STRING, offsetof(rfaas_lease_options, library), sizeof(((rfaas_lease_options *)0)->library) },
    { "library_data", FIELD_BUFFER, offsetof(rfaas_lease_options, library_data), offsetof(rfaas_lease_options, library_size) },
    { "executor", FIELD_STRING, offsetof(rfaas_lease_options, executor), sizeof(((rfaas_lease_options *)0)->executor) },
    { "call_limit", FIELD_SECONDS, offsetof(rfaas_lease_options, call_limit_ns), sizeof(((rfaas_lease_options *)0)->call_limit_ns) },
    { "wait", FIELD_SECONDS, offsetof(rfaas_lease_options, wait_ns), sizeof(((rfaas_lease_options *)0)->wait_ns) },
    { "bundle", FIELD_STRING, offsetof(rfaas_lease_options, bundle), sizeof(((rfaas_lease_options *)0)->bundle) },
    { "init_function", FIELD_STRING, offsetof(rfaas_lease_options, init_function), sizeof(((rfaas_lease_options *)0)->init_function) },
    { "init_payload", FIELD_BUFFER, offsetof(rfaas_lease_options, init_payload), offsetof(rfaas_lease_options, init_size) },
    { "workers_min", FIELD_UINT32, offsetof(rfaas_lease_options, workers_min), sizeof(((rfaas_lease_options *)0)->workers_min) },
    { "bulk_max", FIELD_UINT64, offsetof(rfaas_lease_options, bulk_max), sizeof(((rfaas_lease_options *)0)->bulk_max) },
    { "seed", FIELD_STRING, offsetof(rfaas_lease_options, seed), sizeof(((rfaas_lease_options *)0)->seed) },
    { "runtime", FIELD_STRING, offsetof(rfaas_lease_options, runtime), sizeof(((rfaas_lease_options *)0)->runtime) },
    { 0 },
};

__attribute__((unused)) static const binding_flag rfaas_lease_options_flags[] = {
    { "renew", RFAAS_LEASE_RENEW },
    { "failover", RFAAS_LEASE_FAILOVER },
    { "local", RFAAS_LEASE_LOCAL },
    { "reuse", RFAAS_LEASE_REUSE },
    { "seed", RFAAS_LEASE_SEED },
    { "seed_required", RFAAS_LEASE_SEED_REQUIRED },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_event_fields[] = {
    { "kind", FIELD_UINT32, offsetof(rfaas_event, kind), sizeof(((rfaas_event *)0)->kind) },
    { "worker", FIELD_UINT32, offsetof(rfaas_event, worker), sizeof(((rfaas_event *)0)->worker) },
    { "lost", FIELD_UINT32, offsetof(rfaas_event, lost), sizeof(((rfaas_event *)0)->lost) },
    { "left", FIELD_SECONDS, offsetof(rfaas_event, left_ns), sizeof(((rfaas_event *)0)->left_ns) },
    { "text", FIELD_TEXT, offsetof(rfaas_event, text), sizeof(((rfaas_event *)0)->text) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_lease_details_fields[] = {
    { "workers", FIELD_UINT32, offsetof(rfaas_lease_details, workers), sizeof(((rfaas_lease_details *)0)->workers) },
    { "depth", FIELD_UINT32, offsetof(rfaas_lease_details, depth), sizeof(((rfaas_lease_details *)0)->depth) },
    { "eager", FIELD_UINT32, offsetof(rfaas_lease_details, eager), sizeof(((rfaas_lease_details *)0)->eager) },
    { "bulk", FIELD_UINT64, offsetof(rfaas_lease_details, bulk), sizeof(((rfaas_lease_details *)0)->bulk) },
    { "lease_id", FIELD_UINT64, offsetof(rfaas_lease_details, lease_id), sizeof(((rfaas_lease_details *)0)->lease_id) },
    { "functions", FIELD_UINT32, offsetof(rfaas_lease_details, functions), sizeof(((rfaas_lease_details *)0)->functions) },
    { "replaced", FIELD_UINT32, offsetof(rfaas_lease_details, replaced), sizeof(((rfaas_lease_details *)0)->replaced) },
    { "node", FIELD_TEXT, offsetof(rfaas_lease_details, node), sizeof(((rfaas_lease_details *)0)->node) },
    { "executor", FIELD_TEXT, offsetof(rfaas_lease_details, executor), sizeof(((rfaas_lease_details *)0)->executor) },
    { "provider", FIELD_TEXT, offsetof(rfaas_lease_details, provider), sizeof(((rfaas_lease_details *)0)->provider) },
    { "node_name", FIELD_TEXT, offsetof(rfaas_lease_details, node_name), sizeof(((rfaas_lease_details *)0)->node_name) },
    { "executor_address", FIELD_TEXT, offsetof(rfaas_lease_details, executor_address), sizeof(((rfaas_lease_details *)0)->executor_address) },
    { "left", FIELD_SECONDS, offsetof(rfaas_lease_details, left_ns), sizeof(((rfaas_lease_details *)0)->left_ns) },
    { "local_reason", FIELD_TEXT, offsetof(rfaas_lease_details, local_reason), sizeof(((rfaas_lease_details *)0)->local_reason) },
    { "workers_wanted", FIELD_UINT32, offsetof(rfaas_lease_details, workers_wanted), sizeof(((rfaas_lease_details *)0)->workers_wanted) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_worker_start_fields[] = {
    { "start", FIELD_UINT32, offsetof(rfaas_worker_start, start), sizeof(((rfaas_worker_start *)0)->start) },
    { "pid", FIELD_INT32, offsetof(rfaas_worker_start, pid), sizeof(((rfaas_worker_start *)0)->pid) },
    { "fork", FIELD_SECONDS, offsetof(rfaas_worker_start, fork_ns), sizeof(((rfaas_worker_start *)0)->fork_ns) },
    { "sandbox", FIELD_SECONDS, offsetof(rfaas_worker_start, sandbox_ns), sizeof(((rfaas_worker_start *)0)->sandbox_ns) },
    { "connect", FIELD_SECONDS, offsetof(rfaas_worker_start, connect_ns), sizeof(((rfaas_worker_start *)0)->connect_ns) },
    { "code", FIELD_SECONDS, offsetof(rfaas_worker_start, code_ns), sizeof(((rfaas_worker_start *)0)->code_ns) },
    { "unseeded", FIELD_TEXT, offsetof(rfaas_worker_start, unseeded), sizeof(((rfaas_worker_start *)0)->unseeded) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_worker_details_fields[] = {
    { "pid", FIELD_INT32, offsetof(rfaas_worker_details, pid), sizeof(((rfaas_worker_details *)0)->pid) },
    { "calls", FIELD_UINT64, offsetof(rfaas_worker_details, calls), sizeof(((rfaas_worker_details *)0)->calls) },
    { "failed", FIELD_UINT64, offsetof(rfaas_worker_details, failed), sizeof(((rfaas_worker_details *)0)->failed) },
    { "refused", FIELD_UINT64, offsetof(rfaas_worker_details, refused), sizeof(((rfaas_worker_details *)0)->refused) },
    { "bytes_in", FIELD_UINT64, offsetof(rfaas_worker_details, bytes_in), sizeof(((rfaas_worker_details *)0)->bytes_in) },
    { "bytes_out", FIELD_UINT64, offsetof(rfaas_worker_details, bytes_out), sizeof(((rfaas_worker_details *)0)->bytes_out) },
    { "running", FIELD_TEXT, offsetof(rfaas_worker_details, running), sizeof(((rfaas_worker_details *)0)->running) },
    { "output_size", FIELD_UINT32, offsetof(rfaas_worker_details, output_size), sizeof(((rfaas_worker_details *)0)->output_size) },
    { "output", FIELD_TEXT, offsetof(rfaas_worker_details, output), sizeof(((rfaas_worker_details *)0)->output) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_call_options_fields[] = {
    { "worker", FIELD_INT32, offsetof(rfaas_call_options, worker), sizeof(((rfaas_call_options *)0)->worker) },
    { "timeout", FIELD_SECONDS, offsetof(rfaas_call_options, timeout_ns), sizeof(((rfaas_call_options *)0)->timeout_ns) },
    { "repeats", FIELD_UINT32, offsetof(rfaas_call_options, repeats), sizeof(((rfaas_call_options *)0)->repeats) },
    { "attempt", FIELD_SECONDS, offsetof(rfaas_call_options, attempt_ns), sizeof(((rfaas_call_options *)0)->attempt_ns) },
    { "keep", FIELD_UINT64, offsetof(rfaas_call_options, keep), sizeof(((rfaas_call_options *)0)->keep) },
    { 0 },
};

__attribute__((unused)) static const binding_flag rfaas_call_options_flags[] = {
    { "kill", RFAAS_CALL_KILL },
    { "in_place", RFAAS_CALL_IN_PLACE },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_seed_options_fields[] = {
    { "name", FIELD_STRING, offsetof(rfaas_seed_options, name), sizeof(((rfaas_seed_options *)0)->name) },
    { "ttl", FIELD_SECONDS, offsetof(rfaas_seed_options, ttl_ns), sizeof(((rfaas_seed_options *)0)->ttl_ns) },
    { 0 },
};

__attribute__((unused)) static const binding_flag rfaas_seed_options_flags[] = {
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_seed_details_fields[] = {
    { "version", FIELD_UINT32, offsetof(rfaas_seed_details, version), sizeof(((rfaas_seed_details *)0)->version) },
    { "bytes", FIELD_UINT64, offsetof(rfaas_seed_details, bytes), sizeof(((rfaas_seed_details *)0)->bytes) },
    { "memory", FIELD_UINT64, offsetof(rfaas_seed_details, memory), sizeof(((rfaas_seed_details *)0)->memory) },
    { "children", FIELD_UINT64, offsetof(rfaas_seed_details, children), sizeof(((rfaas_seed_details *)0)->children) },
    { "left", FIELD_SECONDS, offsetof(rfaas_seed_details, left_ns), sizeof(((rfaas_seed_details *)0)->left_ns) },
    { "load", FIELD_SECONDS, offsetof(rfaas_seed_details, load_ns), sizeof(((rfaas_seed_details *)0)->load_ns) },
    { "setup", FIELD_SECONDS, offsetof(rfaas_seed_details, setup_ns), sizeof(((rfaas_seed_details *)0)->setup_ns) },
    { "capture", FIELD_SECONDS, offsetof(rfaas_seed_details, capture_ns), sizeof(((rfaas_seed_details *)0)->capture_ns) },
    { "executor", FIELD_TEXT, offsetof(rfaas_seed_details, executor), sizeof(((rfaas_seed_details *)0)->executor) },
    { "node", FIELD_TEXT, offsetof(rfaas_seed_details, node), sizeof(((rfaas_seed_details *)0)->node) },
    { "setup", FIELD_TEXT, offsetof(rfaas_seed_details, setup), sizeof(((rfaas_seed_details *)0)->setup) },
    { "warning", FIELD_TEXT, offsetof(rfaas_seed_details, warning), sizeof(((rfaas_seed_details *)0)->warning) },
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_map_options_fields[] = {
    { "chunk", FIELD_SIZE, offsetof(rfaas_map_options, chunk), sizeof(((rfaas_map_options *)0)->chunk) },
    { "timeout", FIELD_SECONDS, offsetof(rfaas_map_options, timeout_ns), sizeof(((rfaas_map_options *)0)->timeout_ns) },
    { "repeats", FIELD_UINT32, offsetof(rfaas_map_options, repeats), sizeof(((rfaas_map_options *)0)->repeats) },
    { 0 },
};

__attribute__((unused)) static const binding_flag rfaas_map_options_flags[] = {
    { 0 },
};

__attribute__((unused)) static const binding_field rfaas_statistics_fields[] = {
    { "replaced", FIELD_UINT32, offsetof(rfaas_statistics, replaced), sizeof(((rfaas_statistics *)0)->replaced) },
    { "calls", FIELD_UINT64, offsetof(rfaas_statistics, calls), sizeof(((rfaas_statistics *)0)->calls) },
    { "replies", FIELD_UINT64, offsetof(rfaas_statistics, replies), sizeof(((rfaas_statistics *)0)->replies) },
    { "abandoned", FIELD_UINT64, offsetof(rfaas_statistics, abandoned), sizeof(((rfaas_statistics *)0)->abandoned) },
    { "late", FIELD_UINT64, offsetof(rfaas_statistics, late), sizeof(((rfaas_statistics *)0)->late) },
    { "busy", FIELD_UINT64, offsetof(rfaas_statistics, busy), sizeof(((rfaas_statistics *)0)->busy) },
    { "bytes_in", FIELD_UINT64, offsetof(rfaas_statistics, bytes_in), sizeof(((rfaas_statistics *)0)->bytes_in) },
    { "bytes_out", FIELD_UINT64, offsetof(rfaas_statistics, bytes_out), sizeof(((rfaas_statistics *)0)->bytes_out) },
    { "blocked", FIELD_UINT64, offsetof(rfaas_statistics, blocked), sizeof(((rfaas_statistics *)0)->blocked) },
    { "repeated", FIELD_UINT64, offsetof(rfaas_statistics, repeated), sizeof(((rfaas_statistics *)0)->repeated) },
    { "moved", FIELD_UINT64, offsetof(rfaas_statistics, moved), sizeof(((rfaas_statistics *)0)->moved) },
    { "local", FIELD_UINT64, offsetof(rfaas_statistics, local), sizeof(((rfaas_statistics *)0)->local) },
    { "cold", FIELD_UINT64, offsetof(rfaas_statistics, cold), sizeof(((rfaas_statistics *)0)->cold) },
    { "pooled", FIELD_UINT64, offsetof(rfaas_statistics, pooled), sizeof(((rfaas_statistics *)0)->pooled) },
    { "cached", FIELD_UINT64, offsetof(rfaas_statistics, cached), sizeof(((rfaas_statistics *)0)->cached) },
    { "queue_pairs", FIELD_UINT64, offsetof(rfaas_statistics, queue_pairs), sizeof(((rfaas_statistics *)0)->queue_pairs) },
    { "open", FIELD_SECONDS, offsetof(rfaas_statistics, open_ns), sizeof(((rfaas_statistics *)0)->open_ns) },
    { "cached_leases", FIELD_UINT64, offsetof(rfaas_statistics, cached_leases), sizeof(((rfaas_statistics *)0)->cached_leases) },
    { "seeded", FIELD_UINT64, offsetof(rfaas_statistics, seeded), sizeof(((rfaas_statistics *)0)->seeded) },
    { 0 },
};

#endif
