// Package bundle makes, packs and unpacks bundles: files of a client that travel with its library of functions. These are the libraries that
// it needs from outside the system's directories, and files and directories that the program names.
//
// A packed bundle is a tar archive, followed by zeros up to the memory that the files take when they are unpacked. So its size is at
// once the size of the transfer, the memory that the tenant is charged for, and the limit for unpacking.
package bundle
