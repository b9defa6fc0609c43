//! Failed assertions as values.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

/// A failed assertion, and how to get there.
#[derive(Debug)]
pub struct Violation<A> {
    /// The message of the assertion, and its place.
    pub message: String,
    /// The shortest series of steps.
    pub trace: Vec<A>,
}

impl<A: fmt::Debug> fmt::Display for Violation<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, after {} steps:", self.message, self.trace.len())?;
        for (number, action) in self.trace.iter().enumerate() {
            writeln!(f, "{:4}. {action:?}", number + 1)?;
        }
        Ok(())
    }
}

thread_local! {
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
    static MESSAGE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Returns the message of the panic with which a function ends, instead of printing it.
pub(crate) fn caught(act: impl FnOnce()) -> Result<(), String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if IS_CAUGHT.get() {
                let place = panic.location().map_or(String::new(), |at| format!(" ({}:{})", at.file(), at.line()));
                let payload = panic.payload();
                let text = payload.downcast_ref::<&str>().copied();
                let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
                let text = text.unwrap_or("a panic without a message");
                MESSAGE.set(format!("{text}{place}"));
            } else {
                usual(panic);
            }
        }));
    });
    IS_CAUGHT.set(true);
    // The values are not used after a panic.
    let result = catch_unwind(AssertUnwindSafe(act));
    IS_CAUGHT.set(false);
    result.map_err(|_| MESSAGE.take())
}
