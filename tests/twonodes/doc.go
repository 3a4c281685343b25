// Package twonodes tests provider tcp between two network namespaces, which act as two nodes. It needs root and the program ip.
package twonodes
