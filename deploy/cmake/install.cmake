# What is installed where. Components are the Debian packages of packaging.cmake; `cmake --install build` takes all.
install(TARGETS mkerneld mkctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT mkerneld)
# Shell completion is what mkctl says of itself.
foreach(shell bash zsh fish)
  add_custom_command(OUTPUT ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.${shell} DEPENDS mkctl VERBATIM
    COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/deploy/completion
    COMMAND sh -c "$<TARGET_FILE:mkctl> completion ${shell} >'${PROJECT_BINARY_DIR}/deploy/completion/mkctl.${shell}'")
endforeach()
add_custom_target(mkctl_completion ALL DEPENDS ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.bash
  ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.zsh ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.fish)
install(FILES ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.bash RENAME mkctl
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions COMPONENT mkerneld)
install(FILES ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.zsh RENAME _mkctl
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/zsh/vendor-completions COMPONENT mkerneld)
install(FILES ${PROJECT_BINARY_DIR}/deploy/completion/mkctl.fish
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/fish/vendor_completions.d COMPONENT mkerneld)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/mkerneld.toml.example
        DESTINATION ${CMAKE_INSTALL_FULL_SYSCONFDIR}/mkernel RENAME mkerneld.toml COMPONENT mkerneld)
foreach(folder prometheus grafana)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/deploy/${folder}
          DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/mkerneld COMPONENT mkerneld)
endforeach()
# Slurm's hooks, and the job that shows the launchers.
install(PROGRAMS ${PROJECT_SOURCE_DIR}/deploy/slurm/prolog ${PROJECT_SOURCE_DIR}/deploy/slurm/epilog
        ${PROJECT_SOURCE_DIR}/deploy/slurm/node-health DESTINATION lib/mkernel/slurm COMPONENT mkerneld)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/slurm/common.sh DESTINATION lib/mkernel/slurm COMPONENT mkerneld)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/deploy/examples
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/libmkclient-dev COMPONENT libmkclient-dev)

install(TARGETS mkclient
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT libmkclient1 NAMELINK_COMPONENT libmkclient-dev)
# Headers: those of client/include and what they include of ours, see the script.
install(CODE "set(mk_source \"${PROJECT_SOURCE_DIR}\")
set(mk_include \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}\")" COMPONENT libmkclient-dev)
install(SCRIPT ${PROJECT_SOURCE_DIR}/deploy/cmake/install_headers.cmake COMPONENT libmkclient-dev)

# For find_package(mkernel) and pkg-config: both find the tree from where they lie in it.
include(CMakePackageConfigHelpers)
set(mk_config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/mkernel)
set(mk_staging ${PROJECT_BINARY_DIR}/deploy)
configure_package_config_file(${PROJECT_SOURCE_DIR}/deploy/cmake/mkernel-config.cmake.in
  ${mk_staging}/mkernel-config.cmake INSTALL_DESTINATION ${mk_config_folder}
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${mk_staging}/mkernel-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${mk_staging}/mkernel-config.cmake ${mk_staging}/mkernel-config-version.cmake
        DESTINATION ${mk_config_folder} COMPONENT libmkclient-dev)
file(RELATIVE_PATH mk_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/deploy/cmake/mkclient.pc.in ${mk_staging}/mkclient.pc @ONLY)
install(FILES ${mk_staging}/mkclient.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT libmkclient-dev)

install(TARGETS mkrun mkbench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT mkernel-tools)

# Man pages, when scdoc is there.
find_program(MK_SCDOC scdoc)
if(MK_SCDOC)
  set(pages "")
  set(mk_example ${PROJECT_SOURCE_DIR}/deploy/mkerneld.toml.example)
  function(mk_man_page name section component)
    set(source ${PROJECT_SOURCE_DIR}/deploy/man/${name}.${section}.scd)
    set(page ${PROJECT_BINARY_DIR}/deploy/man/${name}.${section}.gz)
    add_custom_command(OUTPUT ${page} DEPENDS ${source} ${mk_example} VERBATIM
      COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/deploy/man
      # A pipeline has the status of its last command: gzip by itself, or a page that scdoc refuses would be an empty one.
      COMMAND sh -c "sed -e '/^@EXAMPLE@$/r ${mk_example}' -e '/^@EXAMPLE@$/d' '${source}' | '${MK_SCDOC}' >'${page}.text'"
      COMMAND sh -c "gzip -9nc '${page}.text' >'${page}'")
    install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section} COMPONENT ${component})
    list(APPEND pages ${page})
    set(pages "${pages}" PARENT_SCOPE)
  endfunction()
  mk_man_page(mkerneld 8 mkerneld)
  mk_man_page(mkerneld.toml 5 mkerneld)
  mk_man_page(mkctl 1 mkerneld)
  mk_man_page(mkrun 1 mkernel-tools)
  mk_man_page(mkbench 1 mkernel-tools)
  mk_man_page(libmkclient 3 libmkclient-dev)
  add_custom_target(man ALL DEPENDS ${pages})
  mk_feature(man ON "${MK_SCDOC}")
else()
  mk_feature(man OFF "scdoc not found (Debian: scdoc)")
endif()
