//! The repository's promises to a user who has just cloned it.

mod dependencies;
mod help;
mod make_run;
mod security_page;
