//! Cluster harness and the test suites that run real processes.
