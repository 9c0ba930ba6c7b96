//! Where an export may be written.

use super::{TARGET, dflash, stored};
use hspec_core::drafter::{Format, export};
use std::fs;

#[test]
fn a_folder_that_is_not_empty_is_left_alone() {
    let (own, out) = (dflash(512), tempfile::tempdir().unwrap());
    fs::write(out.path().join("notes"), "mine").unwrap();
    let message = export(own.path(), Format::ZLab, None, out.path()).unwrap_err().to_string();
    assert!(
        message.ends_with("folder: found files in it, expected an empty folder, or none of this name"),
        "{message}"
    );
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1);
    let message = export(own.path(), Format::ZLab, None, &out.path().join("notes")).unwrap_err().to_string();
    assert!(message.contains("notes: ") && message.contains("Not a directory"), "{message}");
    fs::remove_file(out.path().join("notes")).unwrap();
    export(own.path(), Format::ZLab, None, out.path()).unwrap();
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 2);
}

/// A link and the current folder once failed when all was computed, as a folder cannot be renamed over them.
#[cfg(unix)]
#[test]
fn an_empty_folder_stays_the_folder_that_it_is() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let (own, parent) = (dflash(512), tempfile::tempdir().unwrap());
    let at = |name: &str| parent.path().join(name);
    fs::create_dir(at("real")).unwrap();
    symlink(at("real"), at("link")).unwrap();
    let number = fs::metadata(at("real")).unwrap().ino();
    export(own.path(), Format::ZLab, None, &at("link")).unwrap();
    assert!(at("link").is_symlink());
    assert_eq!(fs::metadata(at("real")).unwrap().ino(), number);
    assert!(stored(&at("real")) == stored(own.path()));
    assert_eq!(fs::read_dir(at("real")).unwrap().count(), 2);

    symlink(at("nothing"), at("dangling")).unwrap();
    let message = export(own.path(), Format::ZLab, None, &at("dangling")).unwrap_err().to_string();
    assert!(
        message.ends_with("folder: found a link to nothing, expected an empty folder, or none of this name")
    );
}

/// A folder inside the drafter's own was once written, and read as a part of it.
#[test]
fn what_is_read_is_not_written_into() {
    let own = dflash(512);
    for out in ["out", "a/b"] {
        let out = own.path().join(out);
        let message = export(own.path(), Format::ZLab, None, &out).unwrap_err().to_string();
        let found = format!("found a place inside {}, which is read", own.path().display());
        let expected = format!("{}: folder: {found}, expected a folder outside of it", out.display());
        assert_eq!(message, expected);
    }
    let parent = tempfile::tempdir().unwrap();
    let model = parent.path().join("model");
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(hspec_goldens::root().join(TARGET).join(file), model.join(file)).unwrap();
    }
    let message = export(own.path(), Format::ZLab, Some(&model), &model.join("out")).unwrap_err().to_string();
    assert!(message.contains("which is read, expected a folder outside of it"), "{message}");
    assert_eq!(fs::read_dir(own.path()).unwrap().count() + fs::read_dir(&model).unwrap().count(), 4);
}
