/* Where the program itself lies.
 *
 * A seed points into the worker program, libc and other libraries of the process, so a worker can start from the seed of another node only if these lie at
 * the same addresses there. The kernel chooses other addresses for each execution. So the zygote starts itself a second time, without the kernel: it maps
 * the program and the dynamic linker at fixed addresses, fills every gap of the address space but one, so that the linker puts libraries there, and jumps to
 * the linker, as execve does. Workers are clones of the zygote.
 *
 * This hides less from user code than before only in one respect: it knows the addresses of the zygotes of other nodes, too. */
#ifndef RFAAS_SEED_LAYOUT_H
#define RFAAS_SEED_LAYOUT_H

/* dp_layout_enter starts the program again, at fixed addresses. argv is that of main, which has done nothing before. The call returns if the program
 * lies there already, or if it cannot: then its seeds fit workers of this process only. */
void dp_layout_enter(char **argv);
/* dp_layout_end frees what dp_layout_enter has filled, and what is left of the first start. When the libraries of the process are loaded. */
void dp_layout_end(void);

#endif
