//! Collects all mistakes, not only the first: a user wants to fix a file once.

use super::SettingError;

/// Mistakes, in the order in which they were found.
#[derive(Debug, Default)]
pub(super) struct Mistakes(Vec<SettingError>);

impl Mistakes {
    /// Returns a valid value; records a mistake.
    pub(super) fn of<T>(&mut self, judged: Result<T, SettingError>) -> Option<T> {
        self.all(judged.map_err(|error| vec![error]))
    }

    /// The same for values with possibly several mistakes.
    pub(super) fn all<T>(&mut self, judged: Result<T, Vec<SettingError>>) -> Option<T> {
        judged.map_err(|errors| self.0.extend(errors)).ok()
    }

    /// Returns the whole, unless there was a mistake. If `whole` is `None`, there was one.
    pub(super) fn or<T>(self, whole: Option<T>) -> Result<T, Vec<SettingError>> {
        whole.filter(|_| self.0.is_empty()).ok_or(self.0)
    }
}

/// Returns every part, or every mistake.
pub(super) fn collect<T>(judged: impl Iterator<Item = Result<T, SettingError>>) -> Result<Vec<T>, Vec<SettingError>> {
    let mut mistakes = Mistakes::default();
    let right = judged.filter_map(|judged| mistakes.of(judged)).collect();
    mistakes.or(Some(right))
}

/// Returns the first mistake, for callers that need only one.
pub(super) fn first(mistakes: Vec<SettingError>) -> SettingError {
    mistakes.into_iter().next().unwrap_or_else(|| SettingError::hidden("settings", "invalid"))
}
