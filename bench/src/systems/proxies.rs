//! nginx and haproxy, configured for streams as their own documentation recommends: no buffering, persistent
//! connections.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use super::{Logs, SystemError, free_port, on_path};
use crate::programs::Program;

/// One process: the master of a single worker would only watch it.
pub(super) fn nginx(backend: SocketAddr, folder: &Path, logs: Logs) -> Result<(SocketAddr, Vec<Program>), SystemError> {
    let addr = free_port()?;
    let access_log = match logs {
        Logs::Off => "off",
        Logs::Default => "access.log",
    };
    let text = format!(
        "daemon off;
master_process off;
worker_processes 1;
pid nginx.pid;
error_log stderr error;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
  access_log {access_log};
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  tcp_nodelay on;
  upstream backend {{
    server {backend};
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen {addr};
    location / {{
      proxy_pass http://backend;
      proxy_http_version 1.1;
      proxy_set_header Connection \"\";
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"
    );
    let config = folder.join("nginx.conf");
    std::fs::write(&config, text)?;
    let args = ["-p".into(), folder.as_os_str().to_owned(), "-c".into(), config.into_os_string()];
    Ok((addr, vec![Program::start("nginx", &on_path("nginx")?, &args, &[], folder)?]))
}

pub(super) fn haproxy(backend: SocketAddr, folder: &Path) -> Result<(SocketAddr, Vec<Program>), SystemError> {
    let addr = free_port()?;
    let text = format!(
        "global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend clients
  bind {addr}
  default_backend backend
backend backend
  http-reuse always
  server backend {backend} pool-max-conn 1024
"
    );
    let config = folder.join("haproxy.cfg");
    std::fs::write(&config, text)?;
    let args = ["-db".into(), "-q".into(), "-f".into(), config.into_os_string()];
    Ok((addr, vec![Program::start("haproxy", &on_path("haproxy")?, &args, &[], folder)?]))
}

/// The version of a program on the path.
pub(super) fn version(name: &str, flag: &str) -> String {
    on_path(name).map_or_else(|_| String::new(), |binary| version_of(&binary, flag))
}

/// The first token with digits and dots in a program's output.
pub(super) fn version_of(binary: &Path, flag: &str) -> String {
    let Ok(output) = Command::new(binary).arg(flag).output() else { return String::new() };
    let text = [output.stdout, output.stderr].concat();
    numbered(&String::from_utf8_lossy(&text))
}

fn numbered(text: &str) -> String {
    let words = text.split(|letter: char| letter.is_whitespace() || letter == '/' || letter == '-');
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    words.into_iter().find(is_version).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_program_output() {
        assert_eq!(numbered("nginx version: nginx/1.22.1\n"), "1.22.1");
        assert_eq!(numbered("HAProxy version 2.6.12-1+deb12u4 2026/10/17 - https://haproxy.org/\n"), "2.6.12");
        assert_eq!(numbered(""), "");
    }
}
