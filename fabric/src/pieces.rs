//! The local side of one operation: a few pieces of memory that are one after the other on the remote side.

use crate::FabricError;

/// Pieces that one operation has at most: what `net` and `tcp` take.
pub const PIECES_MAX: usize = 4;

/// One to [`PIECES_MAX`] pieces, in the order of the remote bytes.
#[derive(Debug, Clone)]
pub struct Pieces<T> {
    first: T,
    rest: [Option<T>; PIECES_MAX - 1],
}

impl<T> Pieces<T> {
    /// A single piece.
    #[must_use]
    pub fn one(piece: T) -> Self {
        Self { first: piece, rest: [const { None }; PIECES_MAX - 1] }
    }

    /// One more piece, behind the others.
    ///
    /// # Errors
    /// [`FabricError::TooManyPieces`].
    pub fn and(mut self, piece: T) -> Result<Self, FabricError> {
        match self.rest.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(piece),
            None => return Err(FabricError::TooManyPieces { limit: PIECES_MAX, found: PIECES_MAX + 1 }),
        }
        Ok(self)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.first).chain(self.rest.iter().flatten())
    }

    /// How many they are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// Turns each into something else.
    pub(crate) fn try_map<U, E>(self, mut turn: impl FnMut(T) -> Result<U, E>) -> Result<Pieces<U>, E> {
        let first = turn(self.first)?;
        let mut rest = [const { None }; PIECES_MAX - 1];
        for (place, piece) in rest.iter_mut().zip(self.rest) {
            *place = piece.map(&mut turn).transpose()?;
        }
        Ok(Pieces { first, rest })
    }
}

impl<T> From<T> for Pieces<T> {
    fn from(piece: T) -> Self {
        Self::one(piece)
    }
}

impl<T> From<[T; 2]> for Pieces<T> {
    fn from([first, second]: [T; 2]) -> Self {
        Self { first, rest: [Some(second), None, None] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_order_and_are_four_at_most() {
        let pieces = Pieces::one(1).and(2).unwrap().and(3).unwrap().and(4).unwrap();
        assert_eq!((pieces.iter().copied().collect::<Vec<_>>(), pieces.count()), (vec![1, 2, 3, 4], 4));
        let refusal = pieces.clone().and(5).unwrap_err();
        assert_eq!(refusal, FabricError::TooManyPieces { limit: 4, found: 5 });
        let turned = pieces.try_map(|piece| Ok::<_, ()>(piece * 10)).unwrap();
        assert_eq!(turned.iter().copied().collect::<Vec<_>>(), [10, 20, 30, 40]);
        let both: Pieces<i32> = [1, 2].into();
        assert_eq!(both.try_map(|piece| if piece == 2 { Err(piece) } else { Ok(piece) }).unwrap_err(), 2);
    }
}
