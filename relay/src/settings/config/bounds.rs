//! Checks of numbers and of the lengths of lists.

use super::ConfigError;

/// Checks a number, if there is one.
pub(super) fn within<T>(place: &str, value: Option<T>, least: T, most: T) -> Result<(), ConfigError>
where
    T: PartialOrd + std::fmt::Display + Copy,
{
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(ConfigError::refused(place, &value.to_string(), &format!("an integer from {least} to {most}")))
        }
        Some(_) | None => Ok(()),
    }
}

/// Checks the length of a list.
pub(super) fn bounded(place: &str, length: usize, most: usize) -> Result<(), ConfigError> {
    if length <= most {
        return Ok(());
    }
    Err(ConfigError::new(format!("{place}: {length} entries exceed the limit of {most}")))
}
