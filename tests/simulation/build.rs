//! The crate `getrandom` searches for the function of that name among the symbols that a program exports.

fn main() {
    println!("cargo:rustc-link-arg=-Wl,--export-dynamic-symbol=getrandom");
    println!("cargo:rerun-if-changed=build.rs");
}
