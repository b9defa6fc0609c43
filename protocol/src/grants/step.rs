//! The steps of the grants protocol, recorded for `tests/spec`: its specification must allow each of them.

/// Records a step on a link, if the calling crate is built for the simulation. Other builds contain nothing of it.
#[macro_export]
macro_rules! grant_step {
    (if $condition:expr => $op:expr, $link:expr $(, $name:ident = $value:expr)*) => {
        #[cfg(feature = "simulation")]
        if $condition {
            $crate::grant_step!($op, $link $(, $name = $value)*);
        }
    };
    ($op:expr, $link:expr $(, $name:ident = $value:expr)*) => {
        #[cfg(feature = "simulation")]
        ::tracing::debug!(target: "grants", op = $op, link = %$link $(, $name = %$value)*);
    };
}
