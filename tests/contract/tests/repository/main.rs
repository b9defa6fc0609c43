//! What the repository promises to someone who has just cloned it.

mod dependencies;
mod help;
mod make_run;
mod security_page;
