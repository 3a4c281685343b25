/* A set-user-ID program that opens a session. Prints the status and the error. Argument: the executor's address. */
#include <rfaas.h>
#include <stdio.h>

int main(int argc, char **argv) {
    rfaas_session *session;
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    if (argc != 2 || rfaas_init(NULL))
        return 2;
    o.executor = argv[1];
    printf("%d ", rfaas_session_open(&o, &session));
    puts(rfaas_last_error());
    return 0;
}
