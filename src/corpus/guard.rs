//! Keeps a panic inside a library from ending the run: bad data is an error, not a crash.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, and hands back a panic's message without printing it.
///
/// # Errors
/// `work` panicked.
pub fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                before(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    // What `work` borrowed is only read again by callers that drop the row it belonged to.
    let found = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    found.map_err(|panic| format!("a panic: {}", message(panic.as_ref())))
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors() {
        assert_eq!(guarded(|| 3), Ok(3));
        let list: Vec<i32> = Vec::new();
        let found = guarded(|| list[0]);
        assert!(found.unwrap_err().contains("out of bounds"));
    }
}
