//! Groups of hosts in one process, on real disks and real sockets, and child processes that are killed.
