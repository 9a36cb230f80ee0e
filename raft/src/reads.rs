//! Shared read-index rounds: one at a time, each serving all who arrived before it began.
//! Keeps *A round is younger than its callers*: nobody is served by a round that began before they asked, or a write
//! that was acknowledged in between could be missed.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::ReadError;

type Answer = Result<u64, ReadError>;

#[derive(Default)]
struct State {
    waiting: Vec<oneshot::Sender<Answer>>,
    running: bool,
}

/// Who waits for the next round of one group.
#[derive(Clone, Default)]
pub(crate) struct Rounds(Arc<Mutex<State>>);

impl Rounds {
    /// Joins the next round. `round` asks the majority once; it must end by itself.
    pub(crate) async fn join<F, R>(&self, round: F) -> Answer
    where
        F: Fn() -> R + Send + 'static,
        R: Future<Output = Answer> + Send,
    {
        let (answer, waiting) = oneshot::channel();
        let start = {
            let mut state = self.0.lock();
            state.waiting.push(answer);
            !std::mem::replace(&mut state.running, true)
        };
        if start {
            let state = Arc::clone(&self.0);
            // A task of its own, so that a caller that gives up does not take the others with it.
            tokio::spawn(async move {
                loop {
                    let callers = {
                        let mut state = state.lock();
                        state.waiting.retain(|caller| !caller.is_closed());
                        if state.waiting.is_empty() {
                            state.running = false;
                            return;
                        }
                        std::mem::take(&mut state.waiting)
                    };
                    let answer = round().await;
                    for caller in callers {
                        // One that gave up is gone.
                        drop(caller.send(answer.clone()));
                    }
                }
            });
        }
        waiting.await.unwrap_or(Err(ReadError::ShuttingDown))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn callers_that_arrive_during_a_round_share_the_next_one() {
        let rounds = Rounds::default();
        let begun = Arc::new(AtomicU64::new(0));
        let gate = Arc::new(Semaphore::new(0));
        let round = {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            move || {
                let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
                let gate = Arc::clone(&gate);
                async move {
                    gate.acquire().await.unwrap().forget();
                    Ok(number)
                }
            }
        };
        let ask = || {
            let (rounds, round) = (rounds.clone(), round.clone());
            tokio::spawn(async move { rounds.join(round).await })
        };
        let first = ask();
        while begun.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        let rest: Vec<_> = (0..20).map(|_| ask()).collect();
        while rounds.0.lock().waiting.len() < 20 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(2);
        assert_eq!(first.await.unwrap(), Ok(1));
        for caller in rest {
            assert_eq!(caller.await.unwrap(), Ok(2));
        }
        assert_eq!(begun.load(Ordering::SeqCst), 2);
    }
}
