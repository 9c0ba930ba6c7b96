//! A pass of a model on the thread pool.

#[cfg(feature = "flex")]
use rayon::Yield;
#[cfg(feature = "flex")]
use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::backend::Backend;

/// Runs a pass of many small products. On flex it runs on a thread of the pool, and the other threads look for
/// work all the while: a token's pass has some hundred parallel steps of a few dozen microseconds, and to wake
/// a sleeping thread for each would take as long.
pub fn pass<B: Backend, R: Send>(run: impl FnOnce() -> R + Send) -> R {
    #[cfg(feature = "flex")]
    if crate::flex::is_flex::<B>() {
        return awake(run);
    }
    run()
}

#[cfg(feature = "flex")]
thread_local! {
    /// Whether this thread is in the middle of a pass. Waiting for a part of it, it may be handed the request to
    /// help with another; following that, two passes would wait for each other for ever.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

#[cfg(feature = "flex")]
fn awake<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    if BUSY.get() || rayon::current_num_threads() == 1 {
        return run();
    }
    let done = Arc::new(AtomicBool::new(false));
    let until = done.clone();
    // Nobody waits for the helpers: one that finds the pass over does nothing.
    rayon::spawn_broadcast(move |_| help(&until));
    rayon::scope(|_| {
        let _end = End(&done);
        BUSY.set(true);
        run()
    })
}

/// Ends a pass, also where it panics.
#[cfg(feature = "flex")]
struct End<'a>(&'a AtomicBool);

#[cfg(feature = "flex")]
impl Drop for End<'_> {
    fn drop(&mut self) {
        BUSY.set(false);
        self.0.store(true, Ordering::Release);
    }
}

/// How long a helper that finds no work stays. A thread may be handed the request to help while it waits for
/// a piece of a part that it took of the pass: it is needed below then, and nothing here can tell that it is. The
/// pass would wait for it, and it for the end of the pass. Steps of a pass follow each other far faster.
#[cfg(feature = "flex")]
const PATIENCE: Duration = Duration::from_micros(500);

#[cfg(feature = "flex")]
fn help(done: &AtomicBool) {
    const SPINS: usize = 64;
    if BUSY.get() {
        return;
    }
    let mut idle = Instant::now();
    while !done.load(Ordering::Acquire) && idle.elapsed() < PATIENCE {
        if rayon::yield_now() == Some(Yield::Executed) {
            idle = Instant::now();
            continue;
        }
        for _ in 0..SPINS {
            std::hint::spin_loop();
        }
        // Someone else may need this processor, the pass itself not least.
        std::thread::yield_now();
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use rayon::prelude::*;
    type B = burn_flex::Flex;

    fn sum(n: usize) -> usize {
        (0..n).into_par_iter().with_min_len(1).map(|i| i * i % 7).sum()
    }

    #[test]
    fn a_pass_computes_what_it_would_elsewhere() {
        let expected: usize = (0..1000).map(|i| i * i % 7).sum();
        assert_eq!(pass::<B, _>(|| sum(1000)), expected);
        assert_eq!(pass::<B, _>(|| pass::<B, _>(|| sum(1000))), expected);
        assert_eq!(pass::<burn_ndarray::NdArray, _>(|| sum(1000)), expected);
    }

    /// Each, waiting for its parts, could be made to help the other until that is done.
    #[test]
    fn passes_at_the_same_time_do_not_wait_for_each_other() {
        let expected: usize = (0..300).map(|i| i * i % 7).sum();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        assert_eq!(pass::<B, _>(|| sum(300)), expected);
                    }
                });
            }
        });
    }

    /// A thread took a part of a pass before it saw the request to help with it, split the part, lost the other
    /// half to the pass's own thread, and found the request while it waited for that half: decoding stood still.
    #[test]
    fn a_helper_in_the_middle_of_a_part_does_not_wait_for_the_pass() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let wait = |flag: &AtomicBool| {
            while !flag.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        let pass = move || {
            let done = Arc::new(AtomicBool::new(false));
            let until = done.clone();
            let (part, half) = (AtomicBool::new(false), AtomicBool::new(false));
            let _end = End(&done);
            BUSY.set(true);
            // Here until the other thread has the part; there until this one has its half.
            let split = || {
                part.store(true, Ordering::Release);
                rayon::spawn_broadcast(move |_| help(&until));
                let slow = || {
                    half.store(true, Ordering::Release);
                    std::thread::sleep(Duration::from_millis(20));
                };
                rayon::join(|| wait(&half), slow);
            };
            rayon::join(|| wait(&part), split);
        };
        std::thread::spawn(move || {
            pool.install(pass);
            send.send(()).unwrap();
        });
        receive.recv_timeout(Duration::from_secs(30)).expect("the pass ends");
    }

    #[test]
    fn a_panic_leaves_no_thread_helping() {
        let caught = std::panic::catch_unwind(|| pass::<B, ()>(|| panic!("on purpose")));
        assert!(caught.is_err());
        assert_eq!(pass::<B, _>(|| sum(10)), (0..10).map(|i| i * i % 7).sum::<usize>());
    }
}
