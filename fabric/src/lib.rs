//! Safe one-sided RMA on libfabric: domains, endpoints, regions and operations as futures.
