//! Registered memory of a reader's own: values are read straight into it.

use crate::core::Core;
use quarry_fabric::{FabricError, Pool, Span};
use std::{
    fmt,
    sync::{Arc, Weak},
};

/// Memory that is registered once with the fabric, to be read into by [`Namespace::get_into`](crate::Namespace::get_into). Clones share it.
/// It stays registered until the last clone and the last [`Buffer`] of it are gone.
#[derive(Clone)]
pub struct Buffers {
    kept: Arc<Kept>,
}

/// Bytes of one [`Buffers`], free again when dropped. Nobody else reaches them: no operation uses them while they are in the caller's hands.
pub struct Buffer {
    span: Arc<Span>,
    _kept: Arc<Kept>,
}

/// Keeps the memory registered.
struct Kept {
    pool: Arc<Pool>,
    core: Weak<Core>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            core.endpoints.forget_pool(&self.pool);
        }
    }
}

impl Buffers {
    pub(crate) fn new(core: &Arc<Core>, bytes: usize) -> Result<Self, FabricError> {
        let pool = Pool::new(bytes)?;
        core.endpoints.keep_pool(&pool);
        Ok(Self { kept: Arc::new(Kept { pool, core: Arc::downgrade(core) }) })
    }

    /// Waits for `bytes` contiguous bytes (at least one), first come, first served. The caller bounds the wait. What they hold is what their
    /// last owner left there.
    ///
    /// # Errors
    /// [`FabricError::Empty`] for none, [`FabricError::ExceedsPool`] for more than all.
    pub async fn take(&self, bytes: usize) -> Result<Buffer, FabricError> {
        Ok(self.buffer(self.kept.pool.take(bytes).await?))
    }

    /// The same, if they can be had now.
    #[must_use]
    pub fn try_take(&self, bytes: usize) -> Option<Buffer> {
        Some(self.buffer(self.kept.pool.try_take(bytes)?))
    }

    /// Bytes in all.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.kept.pool.capacity()
    }

    /// Bytes in no buffer now, those of dropped calls that are still under way excepted. They need not lie together.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.kept.pool.free_bytes()
    }

    fn buffer(&self, span: Span) -> Buffer {
        Buffer { span: Arc::new(span), _kept: Arc::clone(&self.kept) }
    }
}

impl Buffer {
    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        Arc::get_mut(&mut self.span).expect("an operation lets go of its span before its outcome is told").bytes()
    }

    /// How many bytes it has, at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// For operations: whoever awaits their outcomes has the bytes for itself again.
    pub(crate) fn span(&self) -> &Arc<Span> {
        &self.span
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffers").field(&self.kept.pool).finish()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffer").field(&self.span).finish()
    }
}
