//! The admin token: given directly, or in a file that is read again while the relay runs.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use modelrelay_protocol::config_hash::secret_of_file;
use modelrelay_protocol::secret::Secret;
use tracing::{info, warn};

use super::error::ConfigError;
use crate::settings::config::AdminTokenSource;
use crate::system::file_watch::{Content, FileWatch, read_bounded};

/// The largest token file; a token is one line.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The token of `/admin`.
#[derive(Debug)]
pub struct AdminToken {
    current: Arc<ArcSwapOption<Secret>>,
}

impl AdminToken {
    /// Loads the token. If it is in a file, follows the file until this value is dropped: a new token is in effect
    /// within a second or two, and the last valid one while the file cannot be used. Needs a tokio runtime.
    pub fn start(source: &AdminTokenSource) -> Result<Self, ConfigError> {
        let current = Arc::new(ArcSwapOption::empty());
        match source {
            AdminTokenSource::None => {}
            AdminTokenSource::Value(token) => current.store(Some(Arc::new(token.clone()))),
            AdminTokenSource::File(path) => {
                let mut watch = FileWatch::new(path, MAX_FILE_BYTES);
                let content = watch.poll().unwrap_or_else(|| Ok(Vec::new()));
                let token = token_in(content).map_err(|why| {
                    let setting = "MODELRELAY_ADMIN_TOKEN_FILE (--admin-token-file)";
                    ConfigError::refused(setting, &path.display().to_string(), &why)
                })?;
                current.store(Some(Arc::new(token)));
                let current = Arc::downgrade(&current);
                let path = path.clone();
                tokio::spawn(async move {
                    loop {
                        let content = watch.changed().await;
                        let Some(current) = current.upgrade() else { return };
                        take(&path, content, &current);
                    }
                });
            }
        }
        Ok(Self { current })
    }

    /// The token that is in effect now.
    pub fn current(&self) -> Option<Arc<Secret>> {
        self.current.load_full()
    }

    /// Returns why a request with this token is rejected; `None` if it is accepted.
    pub(crate) fn refusal(&self, presented: &str) -> Option<&'static str> {
        match &*self.current.load() {
            None => Some("the admin API is disabled: set MODELRELAY_ADMIN_TOKEN or MODELRELAY_ADMIN_TOKEN_FILE"),
            Some(token) if !token.verify(presented) => Some("the admin token is missing or wrong"),
            Some(_) => None,
        }
    }
}

fn take(path: &Path, content: Content, current: &ArcSwapOption<Secret>) {
    let file = path.display();
    match token_in(content) {
        Ok(token) if current.load().as_deref() == Some(&token) => {}
        Ok(token) => {
            current.store(Some(Arc::new(token)));
            info!(%file, "admin token reloaded");
        }
        Err(why) => warn!(%file, why, "admin token reload failed; keeping previous token"),
    }
}

/// The token that a file contains now.
pub(crate) fn read(path: &Path) -> Result<Secret, String> {
    token_in(read_bounded(path, MAX_FILE_BYTES))
}

fn token_in(content: Content) -> Result<Secret, String> {
    let text = String::from_utf8(content?).map_err(|_| "the file is not UTF-8 text".to_owned())?;
    let token = secret_of_file(&text);
    if token.is_empty() {
        return Err("the file is empty; it must contain the token".to_owned());
    }
    if token.contains(char::is_control) {
        return Err(
            "the token contains a control character, such as a line end, which is not allowed in a header".to_owned()
        );
    }
    Ok(Secret::new(token))
}
