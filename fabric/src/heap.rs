//! Memory that is freed stays with the process, for a while and up to a bound.
//!
//! By default the C library gives the system back what is free at the top of its heap, and maps what is large anew each time. A node frees and
//! takes buffers of half a MiB all the time (its log database does, for one), so it paid for clearing their pages again and again: a tenth of
//! a meta node's processor time.

/// Larger pieces have a mapping of their own, which goes back to the system at once.
const MAPPED_BYTES: i32 = 8 << 20;
/// Most that is kept at the end of a heap.
const KEPT_BYTES: i32 = 64 << 20;
/// Heaps, where each thread may have one of its own: each keeps so much.
const HEAPS_MAX: i32 = 8;
/// Taken beyond what is asked for when a heap grows.
const AHEAD_BYTES: i32 = 1 << 20;

/// Where an operator says it himself.
const SAID_BY: [&str; 5] =
    ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"];

/// Has the C library keep memory that is freed, instead of asking the system for it again. With `one_heap` all threads share one: right where
/// few processors run at once. Programs call it in `main`, before they have threads.
///
/// Answers whether it is so. An operator's own word on it (`GLIBC_TUNABLES`, `MALLOC_ARENA_MAX` and its like) stands; other C libraries know nothing of it.
pub fn keep_freed_memory(one_heap: bool) -> bool {
    let said = SAID_BY.iter().any(|name| std::env::var_os(name).is_some());
    !said && options(one_heap)
}

#[cfg(target_env = "gnu")]
fn options(one_heap: bool) -> bool {
    let set = |option: libc::c_int, value: libc::c_int| {
        // SAFETY: takes two numbers, locks what it changes, and touches no memory of ours.
        unsafe { libc::mallopt(option, value) == 1 }
    };
    let arenas = set(libc::M_ARENA_MAX, if one_heap { 1 } else { HEAPS_MAX });
    let bounds =
        [(libc::M_MMAP_THRESHOLD, MAPPED_BYTES), (libc::M_TRIM_THRESHOLD, KEPT_BYTES), (libc::M_TOP_PAD, AHEAD_BYTES)];
    bounds.into_iter().fold(arenas, |all, (option, value)| set(option, value) && all)
}

#[cfg(not(target_env = "gnu"))]
fn options(_: bool) -> bool {
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// Pages that this thread got from the system so far.
    fn faults() -> i64 {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: `usage` is a whole rusage on our stack that the call may write.
        let told = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
        assert_eq!(told, 0);
        // SAFETY: all zeros are a valid rusage, and the call has written it.
        unsafe { usage.assume_init() }.ru_minflt
    }

    #[test]
    fn what_is_freed_is_taken_again_without_asking_the_system() {
        assert!(keep_freed_memory(true), "the environment says nothing else here");
        let use_once = || {
            let pieces: Vec<Vec<u8>> = (1..=6).map(|byte| vec![byte; 4 << 20]).collect();
            assert_eq!(pieces.iter().map(|piece| u64::from(piece[4095])).sum::<u64>(), 21);
        };
        use_once();
        let before = faults();
        for _ in 0..10 {
            use_once();
        }
        // Ten times 24 MiB are 61,440 pages.
        assert!(faults() - before < 6_144, "{} pages", faults() - before);
    }
}
