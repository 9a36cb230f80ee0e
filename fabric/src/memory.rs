//! Memory that the network may read and write.
//!
//! Decides how it is mapped (anonymous, zeroed, page aligned, huge pages where they help, not inherited by children) and how its
//! bytes are looked at. Leaves registration to `registration.rs`. A remote peer may change these bytes at any instant, so there
//! is no way to borrow them: they are copied in and out, and whoever checks bytes checks the copy.

use crate::FabricError;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::{fmt, ptr::NonNull, sync::Arc};

/// Below this size huge pages cannot help.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed, page-aligned memory, unmapped when the last `Arc` goes. Endpoints and operations that may touch it hold one.
pub struct Memory {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory without owner; all access goes through `copy_in` and `copy_out`, which no thread's access
// can make unsound since they copy by code that the compiler cannot look into.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `bytes` bytes of zeroed memory, whose pages come when they are first touched.
    ///
    /// # Errors
    /// [`FabricError::Empty`] for zero bytes, [`FabricError::System`] if the system has not that much.
    pub fn allocate(bytes: usize) -> Result<Arc<Self>, FabricError> {
        if bytes == 0 {
            return Err(FabricError::Empty { what: "an allocation" });
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|error| system("mmap", error))?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap without MAP_FIXED never returns address zero");
        let memory = Self { start, length: bytes };
        // A fork would make these pages copy-on-write, and the card would go on writing into the wrong copy.
        memory.advise(Advice::LinuxDontFork).map_err(|error| system("madvise(MADV_DONTFORK)", error))?;
        if bytes >= HUGE_PAGE_BYTES
            && let Err(error) = memory.advise(Advice::LinuxHugepage)
        {
            tracing::debug!(%error, "no huge pages for registered memory, small ones are used");
        }
        Ok(Arc::new(memory))
    }

    /// Like [`allocate`](Self::allocate), with all pages there when it returns: no page fault later, and too little memory shows
    /// now.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_populated(bytes: usize) -> Result<Arc<Self>, FabricError> {
        let memory = Self::allocate(bytes)?;
        match memory.advise(Advice::LinuxPopulateWrite) {
            Ok(()) => {}
            // Kernels before 5.14 do not know this advice: touch every page instead.
            Err(rustix::io::Errno::INVAL) => {
                for offset in (0..bytes).step_by(4096) {
                    memory.copy_in(offset, &[0])?;
                }
            }
            Err(error) => return Err(system("madvise(MADV_POPULATE_WRITE)", error)),
        }
        Ok(memory)
    }

    /// Whether the kernel can make all pages of a mapping come at once (Linux 5.14), as [`allocate_populated`](Self::allocate_populated)
    /// would have it; it touches each page otherwise.
    #[must_use]
    pub fn populates_at_once() -> bool {
        Self::allocate(4096).is_ok_and(|memory| memory.advise(Advice::LinuxPopulateWrite).is_ok())
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Copies `into.len()` bytes from `offset` on, once. Bytes that a peer changes meanwhile may be old or new, in any mixture.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`]; then nothing was copied.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), FabricError> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `at` checked the range, which lives as long as `self`; `into` is ours alone and cannot overlap the mapping.
        unsafe { copy_opaque(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Like [`copy_out`](Self::copy_out), into a new vector.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`].
    pub fn copy_to_vec(&self, offset: usize, length: usize) -> Result<Vec<u8>, FabricError> {
        let from = self.at(offset, length)?;
        let mut copy = Vec::with_capacity(length);
        // SAFETY: `at` checked the source; the vector has room for `length` bytes.
        unsafe { copy_opaque(from, copy.as_mut_ptr(), length) };
        // SAFETY: the first `length` bytes were just written.
        unsafe { copy.set_len(length) };
        Ok(copy)
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`FabricError::OutOfRange`]; then nothing was copied.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), FabricError> {
        let to = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the range, which lives as long as `self`; `bytes` cannot overlap a mapping that is never borrowed.
        unsafe { copy_opaque(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Address of the first byte, for libfabric.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn at(&self, offset: usize, length: usize) -> Result<*mut u8, FabricError> {
        let end = offset.checked_add(length).filter(|end| *end <= self.length);
        if end.is_none() {
            let end = offset.saturating_add(length);
            return Err(FabricError::OutOfRange { start: offset, end, length: self.length });
        }
        // SAFETY: offset <= length of the mapping.
        Ok(unsafe { self.start().add(offset) })
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is our own mapping, and none of the advice that we give discards pages.
        unsafe { madvise(self.start().cast(), self.length, advice) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `allocate`; we are the last to know it, since all who may touch it hold an `Arc`.
        if let Err(error) = unsafe { munmap(self.start().cast(), self.length) } {
            tracing::error!(%error, bytes = self.length, "munmap failed, the memory is lost to this process");
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("start", &self.start).field("length", &self.length).finish()
    }
}

fn system(call: &'static str, error: rustix::io::Errno) -> FabricError {
    FabricError::System { call, text: error.to_string(), hint: crate::error::errno_hint(error.raw_os_error()) }
}

/// Copies each byte once, by code that the compiler cannot look into: it can neither read the source a second time after the
/// copy was checked nor assume that nobody else writes it.
///
/// # Safety
/// Both ranges are mapped for `length` bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_opaque(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") length => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies each byte once with volatile accesses, by words where both sides are aligned.
///
/// # Safety
/// Both ranges are mapped for `length` bytes and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_opaque(from: *const u8, to: *mut u8, length: usize) {
    let mut done = 0;
    if (from as usize | to as usize) % 8 == 0 {
        while done + 8 <= length {
            // SAFETY: done + 8 <= length, and both pointers are aligned for u64.
            let word = unsafe { from.add(done).cast::<u64>().read_volatile() };
            // SAFETY: as above.
            unsafe { to.add(done).cast::<u64>().write_volatile(word) };
            done += 8;
        }
    }
    while done < length {
        // SAFETY: done < length.
        let byte = unsafe { from.add(done).read_volatile() };
        // SAFETY: done < length.
        unsafe { to.add(done).write_volatile(byte) };
        done += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_copied_in_come_out_again_at_every_alignment() {
        let memory = Memory::allocate(64 << 10).unwrap();
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7 % 251).to_le_bytes()[0] + 1).collect();
        for offset in [0, 1, 7, 8, 4095, (64 << 10) - 1000] {
            memory.copy_in(offset, &bytes).unwrap();
            let mut out = vec![0; 1000];
            memory.copy_out(offset, &mut out).unwrap();
            assert_eq!(out, bytes);
            assert_eq!(memory.copy_to_vec(offset, 1000).unwrap(), bytes);
        }
    }

    #[test]
    fn copies_outside_of_the_memory_are_refused_and_copy_nothing() {
        let memory = Memory::allocate(4096).unwrap();
        let mut out = [7; 16];
        for offset in [4081, 4096, usize::MAX - 3] {
            assert!(matches!(memory.copy_out(offset, &mut out), Err(FabricError::OutOfRange { .. })));
            assert!(matches!(memory.copy_in(offset, &out), Err(FabricError::OutOfRange { .. })));
        }
        assert_eq!(out, [7; 16]);
        assert_eq!(memory.copy_to_vec(0, 4096).unwrap(), vec![0; 4096]);
        assert_eq!(memory.copy_in(4096, &[]), Ok(()));
    }

    #[test]
    fn memory_of_zero_or_impossible_size_is_refused() {
        assert!(matches!(Memory::allocate(0), Err(FabricError::Empty { .. })));
        assert!(matches!(Memory::allocate(usize::MAX / 2), Err(FabricError::System { call: "mmap", .. })));
    }

    #[test]
    fn populated_memory_is_resident_and_zeroed() {
        let memory = Memory::allocate_populated(3 << 20).unwrap();
        assert_eq!(memory.len(), 3 << 20);
        assert_eq!(memory.copy_to_vec(0, 3 << 20).unwrap(), vec![0; 3 << 20]);
    }
}
